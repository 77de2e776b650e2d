// AVX-512 (F, BW, DQ, VL), with VNNI and BF16 at level 3: 16 floats a vector, 32 registers.
#pragma once

#ifdef QUIRE_EMULATE_AVX512
#include "kernels/simd/emulated_avx512.h"
#else
#include <immintrin.h>
#endif

namespace quire::QUIRE_ISA {

constexpr int kLanes = 16;
constexpr bool kBf16Products = QUIRE_LEVEL >= 3;
constexpr int kTileTokens = 6;
constexpr int kTileVectors = 2;
constexpr int kAttentionRows = 6;

using F = __m512;
using I = __m512i;
using B = __m512i;

QUIRE_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
QUIRE_INLINE void store(float* p, F v) { _mm512_storeu_ps(p, v); }
QUIRE_INLINE F splat(float v) { return _mm512_set1_ps(v); }
QUIRE_INLINE F zero() { return _mm512_setzero_ps(); }
QUIRE_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
QUIRE_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
QUIRE_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
QUIRE_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
QUIRE_INLINE F square_root(F a) { return _mm512_sqrt_ps(a); }
QUIRE_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
QUIRE_INLINE F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
QUIRE_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
QUIRE_INLINE F abs(F a) { return _mm512_abs_ps(a); }
QUIRE_INLINE F round(F a) { return _mm512_roundscale_ps(a, 0); }
QUIRE_INLINE F scale_by_power(F a, F whole) {
  const __m512i exponent = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(whole), _mm512_set1_epi32(127)), 23);
  return _mm512_mul_ps(a, _mm512_castsi512_ps(exponent));
}

using Mask = __mmask16;
QUIRE_INLINE Mask greater(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
QUIRE_INLINE Mask not_a_number(F a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
QUIRE_INLINE Mask equal(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
QUIRE_INLINE Mask less(I a, I b) { return _mm512_cmplt_epi32_mask(a, b); }
QUIRE_INLINE Mask both(Mask a, Mask b) { return Mask(a & b); }
QUIRE_INLINE Mask either(Mask a, Mask b) { return Mask(a | b); }
QUIRE_INLINE F select(Mask m, F yes, F no) { return _mm512_mask_mov_ps(no, m, yes); }
QUIRE_INLINE I select(Mask m, I yes, I no) { return _mm512_mask_mov_epi32(no, m, yes); }
QUIRE_INLINE bool any(Mask m) { return m != 0; }
// Lanes below `count`.
QUIRE_INLINE Mask first_lanes(int count) {
  return count >= 16 ? Mask(0xffff) : count <= 0 ? Mask(0) : Mask((1u << count) - 1);
}

QUIRE_INLINE I splat_int(int32_t v) { return _mm512_set1_epi32(v); }
QUIRE_INLINE I load_int(const int32_t* p) { return _mm512_loadu_si512(p); }
QUIRE_INLINE void store_int(int32_t* p, I v) { _mm512_storeu_si512(p, v); }
QUIRE_INLINE I add(I a, I b) { return _mm512_add_epi32(a, b); }
QUIRE_INLINE I sub(I a, I b) { return _mm512_sub_epi32(a, b); }
QUIRE_INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }
QUIRE_INLINE I round_to_int(F a) { return _mm512_cvtps_epi32(a); }
QUIRE_INLINE I as_bits(F a) { return _mm512_castps_si512(a); }
QUIRE_INLINE F from_bits(I a) { return _mm512_castsi512_ps(a); }
QUIRE_INLINE I bit_xor(I a, I b) { return _mm512_xor_si512(a, b); }
QUIRE_INLINE I shift_left(I a, int bits) { return _mm512_slli_epi32(a, bits); }
QUIRE_INLINE I shift_right(I a, int bits) { return _mm512_srli_epi32(a, bits); }  // zeros come in
QUIRE_INLINE I shift_right_signed(I a, int bits) { return _mm512_srai_epi32(a, bits); }

// 64-bit products of unsigned lanes.
struct Wide {
  I low, high;
};
QUIRE_INLINE Wide multiply_unsigned(I a, I b) {
  const __m512i even = _mm512_mul_epu32(a, b);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), _mm512_srli_epi64(b, 32));
  return {_mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32)),
          _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd)};
}
// Of four lanes each, lane j of vector i becomes lane i of vector j.
QUIRE_INLINE void transpose_quads(I (&v)[4]) {
  const __m512i low01 = _mm512_unpacklo_epi32(v[0], v[1]), high01 = _mm512_unpackhi_epi32(v[0], v[1]);
  const __m512i low23 = _mm512_unpacklo_epi32(v[2], v[3]), high23 = _mm512_unpackhi_epi32(v[2], v[3]);
  v[0] = _mm512_unpacklo_epi64(low01, low23);
  v[1] = _mm512_unpackhi_epi64(low01, low23);
  v[2] = _mm512_unpacklo_epi64(high01, high23);
  v[3] = _mm512_unpackhi_epi64(high01, high23);
}

QUIRE_INLINE float reduce_add(F v) { return _mm512_reduce_add_ps(v); }
QUIRE_INLINE float reduce_max(F v) { return _mm512_reduce_max_ps(v); }
QUIRE_INLINE int32_t reduce_add(I v) { return _mm512_reduce_add_epi32(v); }

QUIRE_INLINE F load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
QUIRE_INLINE F load_int8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
// kLanes e4m3 numbers in units of kF8Unit, their bits being those of smaller fp16 numbers.
QUIRE_INLINE F load_f8(const uint8_t* p) {
  const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
  return _mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16(int16_t(0xbf80))));
}
QUIRE_INLINE void store_bytes(int8_t* p, I v) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(v)); }
// Values that fit into 16 bits.
QUIRE_INLINE void store_words(int16_t* p, I v) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(v)); }
// Every four lanes in the order 0, 2, 1, 3.
QUIRE_INLINE F swap_middle(F v) { return _mm512_permute_ps(v, 0xd8); }

// kLanes pairs of bf16 as two vectors: .low holds the first of each pair.
struct Pairs {
  F low, high;
};
QUIRE_INLINE Pairs load_pairs(const uint16_t* p) {
  const __m512i x = _mm512_loadu_si512(p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(int32_t(0xffff0000))))};
}

// kLanes bytes as their low and their high nibbles.
QUIRE_INLINE Pairs load_nibbles(const uint8_t* p) {
  const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  return {_mm512_cvtepi32_ps(_mm512_and_si512(x, _mm512_set1_epi32(15))), _mm512_cvtepi32_ps(_mm512_srli_epi32(x, 4))};
}

QUIRE_INLINE B load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
QUIRE_INLINE B splat_quad(const int8_t* p) {
  int32_t quad;
  memcpy(&quad, p, 4);
  return _mm512_set1_epi32(quad);
}
QUIRE_INLINE B low_nibbles(B v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
QUIRE_INLINE B high_nibbles(B v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }

// s8 weights x s16 values: the even and the odd bytes of every four, as words.
struct FineDot {
  __m512i sums;
};
struct FineWeights {
  __m512i even, odd;
};
QUIRE_INLINE void clear(FineDot& dot) { dot.sums = _mm512_setzero_si512(); }
QUIRE_INLINE FineWeights widen(B weights) {
  return {_mm512_srai_epi16(_mm512_slli_epi16(weights, 8), 8), _mm512_srai_epi16(weights, 8)};
}
// Quad `quad` of 16 six-bit values a row, as format.h lays them out.
QUIRE_INLINE FineWeights six_bits(const uint8_t* words, int quad) {
  __m512i even, odd;
  if (quad < 3) {
    even = load_bytes(words + quad * 128);
    odd = _mm512_slli_epi16(even, 6);
  } else {
    const __m512i low = load_bytes(words + 256), two = _mm512_set1_epi16(0x0c00);
    even = _mm512_slli_epi16(load_bytes(words), 12);
    odd = _mm512_slli_epi16(load_bytes(words + 128), 12);
    even = _mm512_or_si512(even, _mm512_and_si512(_mm512_slli_epi16(low, 10), two));
    odd = _mm512_or_si512(odd, _mm512_and_si512(_mm512_slli_epi16(low, 8), two));
  }
  return {_mm512_srai_epi16(even, 10), _mm512_srai_epi16(odd, 10)};
}
QUIRE_INLINE void accumulate(FineDot& dot, FineWeights weights, B even, B odd) {
#if QUIRE_LEVEL >= 3 && !defined(QUIRE_EMULATE_AVX512)
  asm("vpdpwssd %2, %1, %0" : "+v"(dot.sums) : "v"(weights.even), "v"(even));
  asm("vpdpwssd %2, %1, %0" : "+v"(dot.sums) : "v"(weights.odd), "v"(odd));
#else
  dot.sums = _mm512_add_epi32(dot.sums, _mm512_madd_epi16(weights.even, even));
  dot.sums = _mm512_add_epi32(dot.sums, _mm512_madd_epi16(weights.odd, odd));
#endif
}
QUIRE_INLINE I total(FineDot dot) { return dot.sums; }

#if QUIRE_LEVEL >= 3

QUIRE_INLINE void multiply_quads(__m512i& sums, __m512i unsigned_bytes, __m512i signed_bytes) {
#ifdef QUIRE_EMULATE_AVX512
  sums = _mm512_dpbusd_epi32(sums, unsigned_bytes, signed_bytes);
#else
  // With the intrinsic, GCC 12 spills tiles of 24 accumulators.
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(unsigned_bytes), "v"(signed_bytes));
#endif
}
// Adds both products of each pair of bf16.
QUIRE_INLINE F multiply_pairs(F sums, const uint16_t* pairs, __m512i values) {
#ifdef QUIRE_EMULATE_AVX512
  const Pairs w = load_pairs(pairs);
  const F low = _mm512_castsi512_ps(_mm512_slli_epi32(values, 16));
  const F high = _mm512_castsi512_ps(_mm512_and_si512(values, _mm512_set1_epi32(int32_t(0xffff0000))));
  return fma(w.low, low, fma(w.high, high, sums));
#else
  return _mm512_dpbf16_ps(sums, (__m512bh)_mm512_loadu_si512(pairs), (__m512bh)values);
#endif
}

struct NibbleDot {
  __m512i sums;
};
QUIRE_INLINE void clear(NibbleDot& dot) { dot.sums = _mm512_setzero_si512(); }
QUIRE_INLINE void accumulate(NibbleDot& dot, B weights, B values) { multiply_quads(dot.sums, weights, values); }
QUIRE_INLINE I total(NibbleDot dot) { return dot.sums; }

// Weights become unsigned by adding 128; the sum of the values takes that out again.
struct ByteDot {
  __m512i sums;
};
using ByteWeights = __m512i;
QUIRE_INLINE void clear(ByteDot& dot) { dot.sums = _mm512_setzero_si512(); }
QUIRE_INLINE ByteWeights prepare(B weights) { return _mm512_xor_si512(weights, _mm512_set1_epi8(char(0x80))); }
QUIRE_INLINE void accumulate(ByteDot& dot, ByteWeights weights, B values) { multiply_quads(dot.sums, weights, values); }
QUIRE_INLINE I total(ByteDot dot, int32_t value_sum) {
  return _mm512_sub_epi32(dot.sums, _mm512_set1_epi32(128 * value_sum));
}

#else

struct NibbleDot {
  __m512i sums;
};
QUIRE_INLINE void clear(NibbleDot& dot) { dot.sums = _mm512_setzero_si512(); }
QUIRE_INLINE void accumulate(NibbleDot& dot, B weights, B values) {
  dot.sums = _mm512_add_epi16(dot.sums, _mm512_maddubs_epi16(weights, values));
}
QUIRE_INLINE I total(NibbleDot dot) { return _mm512_madd_epi16(dot.sums, _mm512_set1_epi16(1)); }

struct ByteDot {
  __m512i sums;
};
struct ByteWeights {
  __m512i magnitude;
  __mmask64 negative;
};
QUIRE_INLINE void clear(ByteDot& dot) { dot.sums = _mm512_setzero_si512(); }
QUIRE_INLINE ByteWeights prepare(B weights) { return {_mm512_abs_epi8(weights), _mm512_movepi8_mask(weights)}; }
QUIRE_INLINE void accumulate(ByteDot& dot, ByteWeights weights, B values) {
  const __m512i turned = _mm512_mask_sub_epi8(values, weights.negative, _mm512_setzero_si512(), values);
  const __m512i pairs = _mm512_maddubs_epi16(weights.magnitude, turned);
  dot.sums = _mm512_add_epi32(dot.sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
QUIRE_INLINE I total(ByteDot dot, int32_t) { return dot.sums; }

#endif

}  // namespace quire::QUIRE_ISA
