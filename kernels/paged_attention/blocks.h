// Reads keys and values of one block: as pairs of vectors of floats, int8 as quads for integer products.
#pragma once

#include "kernels/paged_attention/kv_layout.h"
#include "kernels/simd/simd.h"

namespace quire::QUIRE_ISA {

// keys(d, token): dims d and d + half of kLanes tokens. values(t, dim): tokens 2t and 2t + 1 of kLanes dims.
template <int kFormat>
struct Block;

template <>
struct Block<kKvF32> {
  const uint8_t* at;
  int half;
  QUIRE_INLINE Pairs keys(const Block& b, int d, int token) {
    const float* k = (const float*)b.at + size_t(d) * kBlockTokens + token;
    return {load(k), load(k + size_t(b.half) * kBlockTokens)};
  }
  QUIRE_INLINE Pairs values(const Block& b, int t, int dim) {
    const float* v = (const float*)(b.at + key_bytes(kKvF32, b.half)) + size_t(t) * 4 * b.half + dim;
    return {load(v), load(v + 2 * b.half)};
  }
};

template <>
struct Block<kKvBf16> {
  const uint8_t* at;
  int half;
  QUIRE_INLINE const uint16_t* key_pairs(const Block& b, int d, int token) {
    return (const uint16_t*)b.at + (size_t(d) * kBlockTokens + token) * 2;
  }
  QUIRE_INLINE const uint16_t* value_pairs(const Block& b, int t, int dim) {
    return (const uint16_t*)(b.at + key_bytes(kKvBf16, b.half)) + (size_t(t) * 2 * b.half + dim) * 2;
  }
  QUIRE_INLINE Pairs keys(const Block& b, int d, int token) { return load_pairs(key_pairs(b, d, token)); }
  QUIRE_INLINE Pairs values(const Block& b, int t, int dim) { return load_pairs(value_pairs(b, t, dim)); }
};

template <>
struct Block<kKvInt8> {
  const uint8_t* at;
  int half;
  // Quads: dims 4d .. 4d + 3 of kLanes tokens; tokens 4t .. 4t + 3 of kLanes dims.
  QUIRE_INLINE B key_quads(const Block& b, int d, int token) {
    return load_bytes(b.at + (size_t(d) * kBlockTokens + token) * 4);
  }
  QUIRE_INLINE B value_quads(const Block& b, int t, int dim) {
    return load_bytes(b.at + key_bytes(kKvInt8, b.half) + (size_t(t) * 2 * b.half + dim) * 4);
  }
  QUIRE_INLINE const uint16_t* key_scales(const Block& b) {
    return (const uint16_t*)(b.at + number_bytes(kKvInt8, b.half));
  }
  QUIRE_INLINE const uint16_t* value_scales(const Block& b) {
    return (const uint16_t*)(b.at + key_bytes(kKvInt8, b.half) + number_bytes(kKvInt8, b.half));
  }
};

template <>
struct Block<kKvInt4> {
  const uint8_t* at;
  int half;
  QUIRE_INLINE Pairs keys(const Block& b, int d, int token) { return load_nibbles(b.at + d * kBlockTokens + token); }
  QUIRE_INLINE Pairs values(const Block& b, int t, int dim) {
    return load_nibbles(b.at + key_bytes(kKvInt4, b.half) + size_t(t) * 2 * b.half + dim);
  }
  // As bf16; minima follow the scales.
  QUIRE_INLINE const uint16_t* key_scales(const Block& b) {
    return (const uint16_t*)(b.at + number_bytes(kKvInt4, b.half));
  }
  QUIRE_INLINE const uint16_t* value_scales(const Block& b) {
    return (const uint16_t*)(b.at + key_bytes(kKvInt4, b.half) + number_bytes(kKvInt4, b.half));
  }
};

}  // namespace quire::QUIRE_ISA
