// Random numbers that belong to a request, and the exp and log that draws and scores need more exactly than exp2.
#pragma once

#include "kernels/sampler/rule.h"
#include "kernels/simd/simd.h"

namespace quire::QUIRE_ISA {

constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;  // whole multiples of the first are exact

// e^x for x <= 88, to 1 ulp; 0 below -87.
QUIRE_INLINE F exp(F x) {
  const F whole = round(mul(max(x, splat(-87.0f)), splat(1.44269504f)));
  F r = fnma(whole, splat(kLn2High), max(x, splat(-87.0f)));
  r = fnma(whole, splat(kLn2Low), r);
  F p = splat(1.3814467e-3f);
  p = fma(p, r, splat(8.3687808e-3f));
  p = fma(p, r, splat(4.1668393e-2f));
  p = fma(p, r, splat(1.6666520e-1f));
  p = fma(p, r, splat(4.9999994e-1f));
  p = add(fma(p, mul(r, r), r), splat(1.0f));
  return select(greater(splat(-87.0f), x), zero(), scale_by_power(p, whole));
}

// The natural logarithm of a normal number above 0, to 1.3 ulp.
QUIRE_INLINE F log(F x) {
  const I bits = as_bits(x);
  // The mantissa within [sqrt(1/2), sqrt(2)), so that the result is exact near 1.
  const I exponent = shift_right_signed(sub(bits, splat_int(0x3f3504f3)), 23);
  const F whole = to_float(exponent);
  const F f = sub(from_bits(sub(bits, shift_left(exponent, 23))), splat(1.0f));
  F p = splat(-7.6344974e-2f);
  p = fma(p, f, splat(1.2761578e-1f));
  p = fma(p, f, splat(-1.3160183e-1f));
  p = fma(p, f, splat(1.4201757e-1f));
  p = fma(p, f, splat(-1.6623357e-1f));
  p = fma(p, f, splat(2.0001227e-1f));
  p = fma(p, f, splat(-2.5000820e-1f));
  p = fma(p, f, splat(3.3333331e-1f));
  const F square = mul(f, f);
  const F tail = fma(mul(p, f), square, mul(whole, splat(kLn2Low)));
  return fma(whole, splat(kLn2High), add(fnma(splat(0.5f), square, f), tail));
}

// Tokens of one call of words: four times as many as there are lanes.
constexpr int kNoiseTokens = 4 * kLanes;

// The layout of philox.py: key (seed), counter (token / 4, output position, choice, purpose 0), word token % 4.
struct Noise {
  uint32_t key0, key1, position, choice;
  I lanes;  // which of the counters each lane has
};

// Word j of a counter is the token's that follows by j, so four words of all lanes become tokens in order if lane
// 4b + i has counter kLanes / 4 * i + b.
QUIRE_INLINE Noise noise_of(const SamplingRule& rule, uint32_t position) {
  int32_t lanes[kLanes];
  for (int i = 0; i < kLanes; i++) lanes[i] = i % 4 * (kLanes / 4) + i / 4;
  return {uint32_t(rule.seed), uint32_t(rule.seed >> 32), position, rule.choice, load_int(lanes)};
}

// Random words of tokens first .. first + kNoiseTokens, in order; `first` is a multiple of 4.
QUIRE_INLINE void words(const Noise& noise, int first, I (&out)[4]) {
  I c0 = add(noise.lanes, splat_int(first / 4)), c1 = splat_int(int32_t(noise.position));
  I c2 = splat_int(int32_t(noise.choice)), c3 = splat_int(0);
  const I m0 = splat_int(int32_t(0xD2511F53)), m1 = splat_int(int32_t(0xCD9E8D57));
  uint32_t k0 = noise.key0, k1 = noise.key1;
  for (int round = 0; round < 10; round++) {
    const Wide product0 = multiply_unsigned(c0, m0), product1 = multiply_unsigned(c2, m1);
    c0 = bit_xor(bit_xor(product1.high, c1), splat_int(int32_t(k0)));
    c2 = bit_xor(bit_xor(product0.high, c3), splat_int(int32_t(k1)));
    c1 = product1.low;
    c3 = product0.low;
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  out[0] = c0;
  out[1] = c1;
  out[2] = c2;
  out[3] = c3;
  transpose_quads(out);
}

QUIRE_INLINE int32_t word_of(const Noise& noise, int token) {
  I random[4];
  words(noise, token / 4 * 4, random);
  int32_t first[kLanes];
  store_int(first, random[0]);
  return first[token % 4];
}

QUIRE_INLINE F gumbel(I word) {
  const F u = mul(add(to_float(shift_right(word, 9)), splat(0.5f)), splat(0x1p-23f));
  return sub(zero(), log(sub(zero(), log(u))));
}

constexpr float kMostGumbel = 16.6356f;  // above that of any word

// Above gumbel(word), by 0.1 at most where that is 3 or more, in a few instructions: -log(-log(u)) <= -log(1 - u), and
// the bits of a float are a lower bound of its logarithm.
QUIRE_INLINE F above_gumbel(I word) {
  const I complement = shift_right(bit_xor(word, splat_int(-1)), 9);
  const F bits = to_float(as_bits(add(to_float(complement), splat(0.5f))));  // of 2^23 (1 - u)
  return fma(bits, splat(-0x1p-23f * 0.69314718f), splat(150.0f * 0.69314718f + 1e-3f));
}

}  // namespace quire::QUIRE_ISA
