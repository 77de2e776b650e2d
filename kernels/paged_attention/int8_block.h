// int8 blocks, multiplied as integers: queries and probabilities become int16 once the block's scales are folded in,
// which loses next to nothing beside the int8 rounding of the block itself.
#pragma once

#include "kernels/matmul/store.h"
#include "kernels/paged_attention/blocks.h"
#include "kernels/paged_attention/rows.h"

namespace quire::QUIRE_ISA {

// out[r][count] = values[r] * scales as int16, every four in the order 0, 2, 1, 3; out_scales[r] = max |x| / 32767.
template <int kRows>
QUIRE_INLINE void fold_scales(const float* values, int stride, const uint16_t* scales, int count, int16_t* out,
                              float* out_scales) {
  F most[kRows], inverse[kRows];
  QUIRE_UNROLL for (int r = 0; r < kRows; r++) most[r] = zero();
  for (int i = 0; i < count; i += kLanes) {
    const F scale = load_bf16(scales + i);
    QUIRE_UNROLL for (int r = 0; r < kRows; r++) most[r] = max(abs(mul(load(values + r * stride + i), scale)), most[r]);
  }
  Mask keep[kRows];
  QUIRE_UNROLL for (int r = 0; r < kRows; r++) {
    const float largest = reduce_max(most[r]);
    inverse[r] = splat(inverse_scale(largest, 32767.0f));
    keep[r] = greater(inverse[r], zero());
    out_scales[r] = largest * (1.0f / 32767.0f);
  }
  for (int i = 0; i < count; i += kLanes) {
    const F scale = load_bf16(scales + i);
    QUIRE_UNROLL for (int r = 0; r < kRows; r++) {
      const F scaled = mul(mul(load(values + r * stride + i), scale), inverse[r]);
      store_words(out + r * count + i, select(keep[r], round_to_int(swap_middle(scaled)), splat_int(0)));
    }
  }
}

// out[r][32] = scale[r] * (inputs[r] . quads), plus what is in `out` where kAdd. inputs [r][4 * quads]; `quads_at(i,
// v)` gives quad i of vector v of 32 lanes.
template <int kRows, bool kAdd, class Quads>
QUIRE_INLINE void multiply_block_quads(int quads, const int16_t* inputs, int stride, const float* scales, float* out,
                                       size_t out_stride, Ahead ahead, Quads quads_at) {
  constexpr int kVectors = 2;  // at a time: more would not fit into the registers
  Fetcher fetcher = make_fetcher(ahead, quads * (kPanelVectors / kVectors));
  for (int vector = 0; vector < kPanelVectors; vector += kVectors) {
    FineDot dots[kRows][kVectors];
    QUIRE_UNROLL for (int r = 0; r < kRows; r++) { QUIRE_UNROLL for (int v = 0; v < kVectors; v++) clear(dots[r][v]); }
    for (int i = 0; i < quads; i++) {
      fetch<kVectors * kLanes / 16 + 1>(fetcher);  // the quads of a turn, and their part of the scales
      FineWeights weights[kVectors];
      QUIRE_UNROLL for (int v = 0; v < kVectors; v++) weights[v] = widen(quads_at(i, vector + v));
      QUIRE_UNROLL for (int r = 0; r < kRows; r++) {
        const int8_t* input = (const int8_t*)(inputs + r * stride + 4 * i);
        const B even = splat_quad(input), odd = splat_quad(input + 4);
        QUIRE_UNROLL for (int v = 0; v < kVectors; v++) accumulate(dots[r][v], weights[v], even, odd);
      }
    }
    QUIRE_UNROLL for (int r = 0; r < kRows; r++) {
      const F scale = splat(scales[r]);
      QUIRE_UNROLL for (int v = 0; v < kVectors; v++) {
        float* at = out + r * out_stride + (vector + v) * kLanes;
        const F product = mul(to_float(total(dots[r][v])), scale);
        store(at, kAdd ? add(load(at), product) : product);
      }
    }
  }
}

}  // namespace quire::QUIRE_ISA
