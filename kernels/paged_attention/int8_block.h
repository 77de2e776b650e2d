// int8 blocks, multiplied as integers: queries and probabilities become int16 once the block's scales are folded in,
// which loses next to nothing beside the int8 rounding of the block itself.
#pragma once

#include "kernels/paged_attention/blocks.h"

namespace quire::QUIRE_ISA {

// `count` values as int16, every four in the order 0, 2, 1, 3; returns the scale, max |x| / 32767.
QUIRE_INLINE float quantize_finely(const float* values, int count, int16_t* out) {
  float most = 0.0f;
  for (int i = 0; i < count; i++) most = __builtin_fabsf(values[i]) > most ? __builtin_fabsf(values[i]) : most;
  const F inverse = splat(most > 0 ? 32767.0f / most : 0.0f);
  int32_t rounded[kLanes];
  for (int i = 0; i < count; i += kLanes) {
    store_int(rounded, round_to_int(mul(load(values + i), inverse)));
    for (int j = 0; j < kLanes; j += 4) {
      out[i + j] = int16_t(rounded[j]);
      out[i + j + 1] = int16_t(rounded[j + 2]);
      out[i + j + 2] = int16_t(rounded[j + 1]);
      out[i + j + 3] = int16_t(rounded[j + 3]);
    }
  }
  return most * (1.0f / 32767.0f);
}

// out[r][32] = scale[r] * (inputs[r] . quads), plus what is in `out` where kAdd. inputs [r][4 * quads]; `quads_at(i,
// v)` gives quad i of vector v of 32 lanes.
template <int kRows, bool kAdd, class Quads>
QUIRE_INLINE void multiply_block_quads(int quads, const int16_t* inputs, int stride, const float* scales, float* out,
                                       size_t out_stride, const uint8_t* next, size_t next_stride, Quads quads_at) {
  FineDot dots[kRows][kPanelVectors];
  QUIRE_UNROLL for (int r = 0; r < kRows; r++) {
    QUIRE_UNROLL for (int v = 0; v < kPanelVectors; v++) clear(dots[r][v]);
  }
  for (int i = 0; i < quads; i++) {
    if (next) {
      prefetch_far(next + i * next_stride);
      prefetch_far(next + i * next_stride + 64);
    }
    QUIRE_UNROLL for (int v = 0; v < kPanelVectors; v++) {
      const FineWeights weights = widen(quads_at(i, v));
      QUIRE_UNROLL for (int r = 0; r < kRows; r++) {
        const int8_t* input = (const int8_t*)(inputs + r * stride + 4 * i);
        accumulate(dots[r][v], weights, splat_quad(input), splat_quad(input + 4));
      }
    }
  }
  QUIRE_UNROLL for (int r = 0; r < kRows; r++) {
    const F scale = splat(scales[r]);
    QUIRE_UNROLL for (int v = 0; v < kPanelVectors; v++) {
      float* at = out + r * out_stride + v * kLanes;
      const F product = mul(to_float(total(dots[r][v])), scale);
      store(at, kAdd ? add(load(at), product) : product);
    }
  }
}

}  // namespace quire::QUIRE_ISA
