// AVX-512 on machines that end at AVX2, to test avx512.h there: SIMDe, and what SIMDe 0.8.2 lacks.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

namespace quire::QUIRE_ISA::emulated {

// The low bits of each lane.
template <class Int, class Result>
QUIRE_INLINE Result narrow(__m512i v) {
  int32_t in[16];
  memcpy(in, &v, sizeof in);
  Int out[16];
  for (int i = 0; i < 16; i++) out[i] = Int(in[i]);
  Result result;
  memcpy(&result, out, sizeof out);
  return result;
}

template <class Byte>
QUIRE_INLINE __m512i widen(__m128i v) {
  Byte in[16];
  memcpy(in, &v, sizeof in);
  int32_t out[16];
  for (int i = 0; i < 16; i++) out[i] = in[i];
  __m512i result;
  memcpy(&result, out, sizeof out);
  return result;
}

// Of every four lanes, the ones that two bits each of `order` name.
QUIRE_INLINE __m512 permute(__m512 v, int order) {
  float in[16], out[16];
  memcpy(in, &v, sizeof in);
  for (int i = 0; i < 16; i++) out[i] = in[i / 4 * 4 + (order >> i % 4 * 2 & 3)];
  memcpy(&v, out, sizeof out);
  return v;
}

// Halves are added until one lane is left, as the compiler does it.
template <class Lane, class Vector>
QUIRE_INLINE Lane reduce_add(Vector v) {
  Lane lanes[16];
  memcpy(lanes, &v, sizeof lanes);
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

}  // namespace quire::QUIRE_ISA::emulated

#define _mm512_cmplt_epi32_mask(a, b) _mm512_cmpgt_epi32_mask(b, a)
#define _mm512_cvtepi32_epi8(v) emulated::narrow<int8_t, __m128i>(v)
#define _mm512_cvtepi32_epi16(v) emulated::narrow<int16_t, __m256i>(v)
#define _mm512_cvtepi8_epi32(v) emulated::widen<int8_t>(v)
#define _mm512_cvtepu8_epi32(v) emulated::widen<uint8_t>(v)
#define _mm512_permute_ps(v, order) emulated::permute(v, order)
#define _mm512_reduce_add_ps(v) emulated::reduce_add<float>(v)
#define _mm512_reduce_add_epi32(v) emulated::reduce_add<int32_t>(v)
