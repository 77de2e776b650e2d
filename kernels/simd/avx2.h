// AVX2, FMA and F16C: 8 floats a vector, 16 registers.
#pragma once

#include <immintrin.h>

namespace quire::QUIRE_ISA {

constexpr int kLanes = 8;
constexpr bool kBf16Products = false;
// Register tiles of a matmul, tokens x vectors of rows: what 16 registers hold.
constexpr int kTileTokens = 4;
constexpr int kTileVectors = 2;
constexpr int kAttentionRows = 3;  // query rows x a whole panel of 32 lanes

using F = __m256;
using I = __m256i;
using B = __m256i;

QUIRE_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
QUIRE_INLINE void store(float* p, F v) { _mm256_storeu_ps(p, v); }
QUIRE_INLINE F splat(float v) { return _mm256_set1_ps(v); }
QUIRE_INLINE F zero() { return _mm256_setzero_ps(); }
QUIRE_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
QUIRE_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
QUIRE_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
QUIRE_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
QUIRE_INLINE F square_root(F a) { return _mm256_sqrt_ps(a); }
QUIRE_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
QUIRE_INLINE F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
QUIRE_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
QUIRE_INLINE F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
QUIRE_INLINE F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
QUIRE_INLINE F scale_by_power(F a, F whole) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(a, _mm256_castsi256_ps(exponent));
}

using Mask = __m256;
QUIRE_INLINE Mask greater(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
QUIRE_INLINE Mask not_a_number(F a) { return _mm256_cmp_ps(a, a, _CMP_UNORD_Q); }
QUIRE_INLINE Mask equal(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
QUIRE_INLINE Mask less(I a, I b) { return _mm256_castsi256_ps(_mm256_cmpgt_epi32(b, a)); }
QUIRE_INLINE Mask both(Mask a, Mask b) { return _mm256_and_ps(a, b); }
QUIRE_INLINE Mask either(Mask a, Mask b) { return _mm256_or_ps(a, b); }
QUIRE_INLINE F select(Mask m, F yes, F no) { return _mm256_blendv_ps(no, yes, m); }
QUIRE_INLINE I select(Mask m, I yes, I no) { return _mm256_blendv_epi8(no, yes, _mm256_castps_si256(m)); }
QUIRE_INLINE bool any(Mask m) { return _mm256_movemask_ps(m) != 0; }
// Lanes below `count`.
QUIRE_INLINE Mask first_lanes(int count) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count), lanes));
}

QUIRE_INLINE I splat_int(int32_t v) { return _mm256_set1_epi32(v); }
QUIRE_INLINE I load_int(const int32_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
QUIRE_INLINE void store_int(int32_t* p, I v) { _mm256_storeu_si256((__m256i*)p, v); }
QUIRE_INLINE I add(I a, I b) { return _mm256_add_epi32(a, b); }
QUIRE_INLINE I sub(I a, I b) { return _mm256_sub_epi32(a, b); }
QUIRE_INLINE F to_float(I a) { return _mm256_cvtepi32_ps(a); }
QUIRE_INLINE I round_to_int(F a) { return _mm256_cvtps_epi32(a); }
QUIRE_INLINE I as_bits(F a) { return _mm256_castps_si256(a); }
QUIRE_INLINE F from_bits(I a) { return _mm256_castsi256_ps(a); }
QUIRE_INLINE I bit_xor(I a, I b) { return _mm256_xor_si256(a, b); }
QUIRE_INLINE I shift_left(I a, int bits) { return _mm256_slli_epi32(a, bits); }
QUIRE_INLINE I shift_right(I a, int bits) { return _mm256_srli_epi32(a, bits); }  // zeros come in
QUIRE_INLINE I shift_right_signed(I a, int bits) { return _mm256_srai_epi32(a, bits); }

// 64-bit products of unsigned lanes.
struct Wide {
  I low, high;
};
QUIRE_INLINE Wide multiply_unsigned(I a, I b) {
  const __m256i even = _mm256_mul_epu32(a, b);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
  return {_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa),
          _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa)};
}
// Of four lanes each, lane j of vector i becomes lane i of vector j.
QUIRE_INLINE void transpose_quads(I (&v)[4]) {
  const __m256i low01 = _mm256_unpacklo_epi32(v[0], v[1]), high01 = _mm256_unpackhi_epi32(v[0], v[1]);
  const __m256i low23 = _mm256_unpacklo_epi32(v[2], v[3]), high23 = _mm256_unpackhi_epi32(v[2], v[3]);
  v[0] = _mm256_unpacklo_epi64(low01, low23);
  v[1] = _mm256_unpackhi_epi64(low01, low23);
  v[2] = _mm256_unpacklo_epi64(high01, high23);
  v[3] = _mm256_unpackhi_epi64(high01, high23);
}

QUIRE_INLINE float reduce_add(F v) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
QUIRE_INLINE float reduce_max(F v) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}
QUIRE_INLINE int32_t reduce_add(I v) {
  __m128i x = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}

QUIRE_INLINE F load_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
QUIRE_INLINE F load_int8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
// kLanes e4m3 numbers in units of kF8Unit, their bits being those of smaller fp16 numbers.
QUIRE_INLINE F load_f8(const uint8_t* p) {
  const __m128i words = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p)), 7);
  return _mm256_cvtph_ps(_mm_and_si128(words, _mm_set1_epi16(int16_t(0xbf80))));
}
// Values within [-128, 127].
QUIRE_INLINE void store_bytes(int8_t* p, I v) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
}
// Values that fit into 16 bits.
QUIRE_INLINE void store_words(int16_t* p, I v) {
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
}
// Every four lanes in the order 0, 2, 1, 3.
QUIRE_INLINE F swap_middle(F v) { return _mm256_permute_ps(v, 0xd8); }

// kLanes pairs of bf16 as two vectors: .low holds the first of each pair.
struct Pairs {
  F low, high;
};
QUIRE_INLINE Pairs load_pairs(const uint16_t* p) {
  const __m256i x = _mm256_loadu_si256((const __m256i*)p);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(int32_t(0xffff0000))))};
}

// kLanes bytes as their low and their high nibbles.
QUIRE_INLINE Pairs load_nibbles(const uint8_t* p) {
  const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  return {_mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(15))), _mm256_cvtepi32_ps(_mm256_srli_epi32(x, 4))};
}

QUIRE_INLINE B load_bytes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
QUIRE_INLINE B splat_quad(const int8_t* p) {
  int32_t quad;
  memcpy(&quad, p, 4);
  return _mm256_set1_epi32(quad);
}
QUIRE_INLINE B low_nibbles(B v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
QUIRE_INLINE B high_nibbles(B v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }

// 15 * 127 * 2 values fit eight times into 16 bits, so that widening to 32 waits for the end of a group.
struct NibbleDot {
  __m256i sums;
};
QUIRE_INLINE void clear(NibbleDot& dot) { dot.sums = _mm256_setzero_si256(); }
QUIRE_INLINE void accumulate(NibbleDot& dot, B weights, B values) {
  dot.sums = _mm256_add_epi16(dot.sums, _mm256_maddubs_epi16(weights, values));
}
QUIRE_INLINE I total(NibbleDot dot) { return _mm256_madd_epi16(dot.sums, _mm256_set1_epi16(1)); }

// Values within [-127, 127], so that |w| x (a with w's sign) cannot saturate; weights may be -128.
struct ByteDot {
  __m256i sums;
};
struct ByteWeights {
  __m256i magnitude, value;
};
QUIRE_INLINE void clear(ByteDot& dot) { dot.sums = _mm256_setzero_si256(); }
QUIRE_INLINE ByteWeights prepare(B weights) { return {_mm256_abs_epi8(weights), weights}; }
QUIRE_INLINE void accumulate(ByteDot& dot, ByteWeights weights, B values) {
  const __m256i pairs = _mm256_maddubs_epi16(weights.magnitude, _mm256_sign_epi8(values, weights.value));
  dot.sums = _mm256_add_epi32(dot.sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
// `value_sum` is the sum of the values that were accumulated.
QUIRE_INLINE I total(ByteDot dot, int32_t) { return dot.sums; }

// s8 weights x s16 values: the even and the odd bytes of every four, as words.
struct FineDot {
  __m256i sums;
};
struct FineWeights {
  __m256i even, odd;
};
QUIRE_INLINE void clear(FineDot& dot) { dot.sums = _mm256_setzero_si256(); }
QUIRE_INLINE FineWeights widen(B weights) {
  return {_mm256_srai_epi16(_mm256_slli_epi16(weights, 8), 8), _mm256_srai_epi16(weights, 8)};
}
// Quad `quad` of 16 six-bit values a row, as format.h lays them out.
QUIRE_INLINE FineWeights six_bits(const uint8_t* words, int quad) {
  __m256i even, odd;
  if (quad < 3) {
    even = load_bytes(words + quad * 128);
    odd = _mm256_slli_epi16(even, 6);
  } else {
    const __m256i low = load_bytes(words + 256), two = _mm256_set1_epi16(0x0c00);
    even = _mm256_slli_epi16(load_bytes(words), 12);
    odd = _mm256_slli_epi16(load_bytes(words + 128), 12);
    even = _mm256_or_si256(even, _mm256_and_si256(_mm256_slli_epi16(low, 10), two));
    odd = _mm256_or_si256(odd, _mm256_and_si256(_mm256_slli_epi16(low, 8), two));
  }
  return {_mm256_srai_epi16(even, 10), _mm256_srai_epi16(odd, 10)};
}
QUIRE_INLINE void accumulate(FineDot& dot, FineWeights weights, B even, B odd) {
  dot.sums = _mm256_add_epi32(dot.sums, _mm256_madd_epi16(weights.even, even));
  dot.sums = _mm256_add_epi32(dot.sums, _mm256_madd_epi16(weights.odd, odd));
}
QUIRE_INLINE I total(FineDot dot) { return dot.sums; }

}  // namespace quire::QUIRE_ISA
