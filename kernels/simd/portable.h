// Plain C++ over the compiler's vector extensions: 8 floats a vector, any machine, the truth for the other sets.
#pragma once

namespace quire::QUIRE_ISA {

constexpr int kLanes = 8;
constexpr bool kBf16Products = false;
constexpr int kTileTokens = 3;
constexpr int kTileVectors = 2;
constexpr int kAttentionRows = 3;

typedef float F __attribute__((vector_size(32)));
typedef int32_t I __attribute__((vector_size(32)));
typedef uint8_t B __attribute__((vector_size(32)));

QUIRE_INLINE F load(const float* p) {
  F v;
  memcpy(&v, p, sizeof v);
  return v;
}
QUIRE_INLINE void store(float* p, F v) { memcpy(p, &v, sizeof v); }
QUIRE_INLINE F splat(float v) { return F{v, v, v, v, v, v, v, v}; }
QUIRE_INLINE F zero() { return F{}; }
QUIRE_INLINE F add(F a, F b) { return a + b; }
QUIRE_INLINE F sub(F a, F b) { return a - b; }
QUIRE_INLINE F mul(F a, F b) { return a * b; }
QUIRE_INLINE F div(F a, F b) { return a / b; }
QUIRE_INLINE F square_root(F a) {
  for (int i = 0; i < kLanes; i++) a[i] = __builtin_sqrtf(a[i]);
  return a;
}
QUIRE_INLINE F fma(F a, F b, F c) { return a * b + c; }
QUIRE_INLINE F fnma(F a, F b, F c) { return c - a * b; }

using Mask = I;
QUIRE_INLINE Mask greater(F a, F b) { return a > b; }
QUIRE_INLINE Mask not_a_number(F a) { return a != a; }
QUIRE_INLINE Mask equal(F a, F b) { return a == b; }
QUIRE_INLINE Mask less(I a, I b) { return a < b; }
QUIRE_INLINE Mask both(Mask a, Mask b) { return a & b; }
QUIRE_INLINE Mask either(Mask a, Mask b) { return a | b; }
QUIRE_INLINE F select(Mask m, F yes, F no) { return m ? yes : no; }
QUIRE_INLINE I select(Mask m, I yes, I no) { return m ? yes : no; }
QUIRE_INLINE bool any(Mask m) {
  int32_t found = 0;
  for (int i = 0; i < kLanes; i++) found |= m[i];
  return found != 0;
}
// Lanes below `count`.
QUIRE_INLINE Mask first_lanes(int count) {
  const I lanes = {0, 1, 2, 3, 4, 5, 6, 7};
  return lanes < count;
}

// As the x86 instruction: the second operand where either is NaN.
QUIRE_INLINE F max(F a, F b) { return a > b ? a : b; }
QUIRE_INLINE F abs(F a) {
  I bits;
  memcpy(&bits, &a, sizeof bits);
  bits &= 0x7fffffff;
  memcpy(&a, &bits, sizeof a);
  return a;
}
QUIRE_INLINE F round(F a) {
  for (int i = 0; i < kLanes; i++) a[i] = __builtin_rintf(a[i]);
  return a;
}

QUIRE_INLINE I splat_int(int32_t v) { return I{v, v, v, v, v, v, v, v}; }
QUIRE_INLINE I load_int(const int32_t* p) {
  I v;
  memcpy(&v, p, sizeof v);
  return v;
}
QUIRE_INLINE void store_int(int32_t* p, I v) { memcpy(p, &v, sizeof v); }
QUIRE_INLINE I add(I a, I b) { return a + b; }
QUIRE_INLINE I sub(I a, I b) { return a - b; }
QUIRE_INLINE F to_float(I a) { return __builtin_convertvector(a, F); }
// NaN and what does not fit become the least integer, as on x86.
QUIRE_INLINE I round_to_int(F a) {
  I v;
  for (int i = 0; i < kLanes; i++) {
    const float whole = __builtin_rintf(a[i]);
    v[i] = whole >= -2147483648.0f && whole < 2147483648.0f ? int32_t(whole) : INT32_MIN;
  }
  return v;
}
QUIRE_INLINE I as_bits(F a) { return (I)a; }
QUIRE_INLINE F from_bits(I a) { return (F)a; }
QUIRE_INLINE I bit_xor(I a, I b) { return a ^ b; }
typedef uint32_t U __attribute__((vector_size(32)));
QUIRE_INLINE I shift_left(I a, int bits) { return (I)((U)a << bits); }
QUIRE_INLINE I shift_right(I a, int bits) { return (I)((U)a >> bits); }  // zeros come in
QUIRE_INLINE I shift_right_signed(I a, int bits) { return a >> bits; }

// 64-bit products of unsigned lanes.
struct Wide {
  I low, high;
};
QUIRE_INLINE Wide multiply_unsigned(I a, I b) {
  Wide product;
  for (int i = 0; i < kLanes; i++) {
    const uint64_t lane = uint64_t(uint32_t(a[i])) * uint32_t(b[i]);
    product.low[i] = int32_t(lane);
    product.high[i] = int32_t(lane >> 32);
  }
  return product;
}
// Of four lanes each, lane j of vector i becomes lane i of vector j.
QUIRE_INLINE void transpose_quads(I (&v)[4]) {
  const I old[4] = {v[0], v[1], v[2], v[3]};
  for (int i = 0; i < 4; i++) {
    for (int lane = 0; lane < kLanes; lane++) v[i][lane] = old[lane % 4][lane / 4 * 4 + i];
  }
}
QUIRE_INLINE F scale_by_power(F a, F whole) {
  const I exponent = (round_to_int(whole) + 127) << 23;
  F power;
  memcpy(&power, &exponent, sizeof power);
  return a * power;
}

QUIRE_INLINE float reduce_add(F v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }
QUIRE_INLINE float reduce_max(F v) {
  float most = v[0];
  for (int i = 1; i < kLanes; i++) most = v[i] > most ? v[i] : most;
  return most;
}
QUIRE_INLINE int32_t reduce_add(I v) {
  int32_t sum = 0;
  for (int i = 0; i < kLanes; i++) sum += v[i];
  return sum;
}

QUIRE_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
  uint32_t bits;
  float value;
  if (exponent == 0) {  // zero and subnormal: fraction * 2^-24 is exact
    value = float(fraction) * 5.9604644775390625e-8f;
    memcpy(&bits, &value, 4);
  } else {
    bits = (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
  }
  bits |= sign;
  memcpy(&value, &bits, 4);
  return value;
}
QUIRE_INLINE F load_half(const uint16_t* p) {
  F v;
  for (int i = 0; i < kLanes; i++) v[i] = half_to_float(p[i]);
  return v;
}
QUIRE_INLINE F load_int8(const int8_t* p) {
  F v;
  for (int i = 0; i < kLanes; i++) v[i] = float(p[i]);
  return v;
}
// kLanes e4m3 numbers in units of kF8Unit, their bits being those of smaller fp16 numbers.
QUIRE_INLINE F load_f8(const uint8_t* p) {
  F v;
  for (int i = 0; i < kLanes; i++) v[i] = half_to_float(uint16_t((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7));
  return v;
}
QUIRE_INLINE void store_bytes(int8_t* p, I v) {
  for (int i = 0; i < kLanes; i++) p[i] = int8_t(v[i]);
}
// Values that fit into 16 bits.
QUIRE_INLINE void store_words(int16_t* p, I v) {
  for (int i = 0; i < kLanes; i++) p[i] = int16_t(v[i]);
}
// Every four lanes in the order 0, 2, 1, 3.
QUIRE_INLINE F swap_middle(F v) { return F{v[0], v[2], v[1], v[3], v[4], v[6], v[5], v[7]}; }

// kLanes pairs of bf16 as two vectors: .low holds the first of each pair.
struct Pairs {
  F low, high;
};
QUIRE_INLINE Pairs load_pairs(const uint16_t* p) {
  uint32_t low[kLanes], high[kLanes];
  for (int i = 0; i < kLanes; i++) {
    low[i] = uint32_t(p[2 * i]) << 16;
    high[i] = uint32_t(p[2 * i + 1]) << 16;
  }
  Pairs pairs;
  memcpy(&pairs.low, low, sizeof low);
  memcpy(&pairs.high, high, sizeof high);
  return pairs;
}

// kLanes bytes as their low and their high nibbles.
QUIRE_INLINE Pairs load_nibbles(const uint8_t* p) {
  Pairs pairs;
  for (int i = 0; i < kLanes; i++) {
    pairs.low[i] = float(p[i] & 15);
    pairs.high[i] = float(p[i] >> 4);
  }
  return pairs;
}

QUIRE_INLINE B load_bytes(const uint8_t* p) {
  B v;
  memcpy(&v, p, sizeof v);
  return v;
}
QUIRE_INLINE B splat_quad(const int8_t* p) {
  B v;
  for (int i = 0; i < kLanes; i++) memcpy((char*)&v + 4 * i, p, 4);
  return v;
}
QUIRE_INLINE B low_nibbles(B v) { return v & 15; }
QUIRE_INLINE B high_nibbles(B v) { return v >> 4; }

struct NibbleDot {
  int32_t sums[kLanes];
};
QUIRE_INLINE void clear(NibbleDot& dot) { dot = {}; }
QUIRE_INLINE void accumulate(NibbleDot& dot, B weights, B values) {
  QUIRE_UNROLL for (int i = 0; i < 4 * kLanes; i++) dot.sums[i / 4] += int32_t(weights[i]) * int8_t(values[i]);
}
QUIRE_INLINE I total(const NibbleDot& dot) { return load_int(dot.sums); }

struct ByteDot {
  int32_t sums[kLanes];
};
using ByteWeights = B;
QUIRE_INLINE void clear(ByteDot& dot) { dot = {}; }
QUIRE_INLINE ByteWeights prepare(B weights) { return weights; }
QUIRE_INLINE void accumulate(ByteDot& dot, ByteWeights weights, B values) {
  QUIRE_UNROLL for (int i = 0; i < 4 * kLanes; i++) dot.sums[i / 4] += int32_t(int8_t(weights[i])) * int8_t(values[i]);
}
QUIRE_INLINE I total(const ByteDot& dot, int32_t) { return load_int(dot.sums); }

// s8 weights x s16 values: the even and the odd bytes of every four, as words.
struct FineDot {
  int32_t sums[kLanes];
};
using FineWeights = B;
QUIRE_INLINE void clear(FineDot& dot) { dot = {}; }
QUIRE_INLINE FineWeights widen(B weights) { return weights; }
// Quad `quad` of 16 six-bit values a row, as format.h lays them out.
QUIRE_INLINE FineWeights six_bits(const uint8_t* words, int quad) {
  B bytes;
  for (int row = 0; row < kLanes; row++) {
    for (int half = 0; half < 2; half++) {
      uint16_t word[3];
      for (int i = 0; i < 3; i++) memcpy(&word[i], words + i * 128 + row * 4 + half * 2, 2);
      const int first = quad < 3 ? word[quad] >> 10 : (word[0] & 15) << 2 | (word[2] & 3);
      const int second = quad < 3 ? word[quad] >> 4 : (word[1] & 15) << 2 | (word[2] >> 2 & 3);
      bytes[row * 4 + half * 2] = uint8_t(((first & 63) ^ 32) - 32);
      bytes[row * 4 + half * 2 + 1] = uint8_t(((second & 63) ^ 32) - 32);
    }
  }
  return bytes;
}
QUIRE_INLINE void accumulate(FineDot& dot, FineWeights weights, B even, B odd) {
  int16_t values[4];  // 0, 2, 1, 3
  memcpy(values, &even, 4);
  memcpy(values + 2, &odd, 4);
  QUIRE_UNROLL for (int i = 0; i < kLanes; i++) {
    dot.sums[i] += int8_t(weights[4 * i]) * values[0] + int8_t(weights[4 * i + 2]) * values[1] +
                   int8_t(weights[4 * i + 1]) * values[2] + int8_t(weights[4 * i + 3]) * values[3];
  }
}
QUIRE_INLINE I total(const FineDot& dot) { return load_int(dot.sums); }

}  // namespace quire::QUIRE_ISA
