// Vectors of the instruction set that this file is compiled for.
//
// Kernels are written once against these names and compiled once per set, in namespace quire::QUIRE_ISA. A panel of a
// packed matrix is 32 rows wide on every set: kPanelVectors vectors of kLanes floats. Everything is always_inline and
// in a namespace of the set's own, so the linker can never pick one set's copy of a function for another.
//
//   F     kLanes floats              load load_half load_f8 store splat add sub mul div fma fnma max abs round ...
//   I     kLanes int32               load_int store_int splat_int to_float round_to_int shift_left ...
//   Mask  one truth a lane           greater equal less not_a_number both either any first_lanes
//   B     4 * kLanes bytes           load_bytes splat_quad low_nibbles high_nibbles
//   NibbleDot  sums of u4 x s8 over at most 8 quads a lane;  ByteDot  sums of s8 x s8;
//      FineDot  sums of s8 x s16
//
// QUIRE_LEVEL: 0 portable, 1 AVX2, 2 AVX-512, 3 AVX-512 with VNNI and BF16.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#define QUIRE_INLINE static inline __attribute__((always_inline))
#if QUIRE_LEVEL > 0 && !defined(QUIRE_EMULATE_AVX512)
#define QUIRE_UNROLL _Pragma("GCC unroll 16")
#else
#define QUIRE_UNROLL _Pragma("GCC unroll 1")
#endif

#if QUIRE_LEVEL >= 2
#include "kernels/simd/avx512.h"
#elif QUIRE_LEVEL == 1
#include "kernels/simd/avx2.h"
#else
#include "kernels/simd/portable.h"
#endif

namespace quire::QUIRE_ISA {

constexpr float kF8Unit = 256.0f;  // of what load_f8 gives
constexpr int kPanelRows = 32;
constexpr int kPanelVectors = kPanelRows / kLanes;

QUIRE_INLINE void prefetch(const void* at) { __builtin_prefetch(at, 0, 3); }
QUIRE_INLINE void prefetch_far(const void* at) { __builtin_prefetch(at, 0, 2); }

QUIRE_INLINE float from_bf16(uint16_t value) {
  uint32_t bits = uint32_t(value) << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}

// kLanes bf16.
QUIRE_INLINE F load_bf16(const uint16_t* p) {
  float wide[kLanes];
  for (int i = 0; i < kLanes; i++) wide[i] = from_bf16(p[i]);
  return load(wide);
}

// Rounds to nearest even; NaN stays NaN.
QUIRE_INLINE uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// 2^x for x <= 126; relative error below 3e-6. Below -126 the result is 2^-126.
QUIRE_INLINE F exp2(F x) {
  x = max(x, splat(-126.0f));
  const F whole = round(x);
  const F f = sub(x, whole);
  F p = splat(1.3333558e-3f);
  p = fma(p, f, splat(9.6181291e-3f));
  p = fma(p, f, splat(5.5504109e-2f));
  p = fma(p, f, splat(2.4022651e-1f));
  p = fma(p, f, splat(6.9314718e-1f));
  p = fma(p, f, splat(1.0f));
  return scale_by_power(p, whole);
}

}  // namespace quire::QUIRE_ISA
