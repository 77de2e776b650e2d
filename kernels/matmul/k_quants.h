// The formats of ggml's K-quants: groups of 256 columns, whose scale is in turn the unit of their parts' small scales.
#pragma once

#include "kernels/matmul/tile.h"

namespace quire::QUIRE_ISA {

// 4-bit weights in groups of 32 x int8 activations.
struct Q4k {
  template <int kTokens, int kVectors>
  QUIRE_INLINE void run(const uint8_t* panel, const Activation& in, int first, int vector,
                        Tile<kTokens, kVectors>& tile, Fetch& fetch) {
    const int8_t* x = in.int8 + size_t(first) * in.k;
    const int groups = in.k / 256;
    for (int g = 0; g < groups; g++, panel += panel_bytes(kQ4k, 256)) {
      const uint16_t* d = (const uint16_t*)panel + vector * kLanes;
      const int8_t* steps = (const int8_t*)panel + 128 + vector * kLanes;
      const uint8_t* w = panel + kQ4kHeader + vector * kLanes * 4;
      if constexpr (kTokens == 1) stream_ahead<kQ4kHeader>(panel);
      if constexpr (kTokens > 1) fetch_beside(fetch, kQ4kHeader);
      for (int part = 0; part < 8; part++, x += 32, steps += kPanelRows, w += 512) {
        if constexpr (kTokens == 1) stream_ahead<512>(w);
        if constexpr (kTokens > 1) fetch_beside(fetch, 512);
        NibbleDot dots[kTokens][kVectors];
        multiply_nibbles(w, x, in.k, dots);
        F scales[kVectors], minima[kVectors];
        QUIRE_UNROLL for (int v = 0; v < kVectors; v++) {
          scales[v] = mul(load_half(d + v * kLanes), load_int8(steps + v * kLanes));
          minima[v] = mul(load_half(d + kPanelRows + v * kLanes), load_int8(steps + 8 * kPanelRows + v * kLanes));
        }
        QUIRE_UNROLL for (int t = 0; t < kTokens; t++) {
          const size_t at = (size_t(g) * 8 + part) * in.stride + first + t;
          const F scale = splat(in.scale[at]), scaled_sum = splat(in.scaled_sum[at]);
          QUIRE_UNROLL for (int v = 0; v < kVectors; v++) {
            tile.sums[t][v] = fma(scales[v], mul(to_float(total(dots[t][v])), scale), tile.sums[t][v]);
            tile.sums[t][v] = fma(minima[v], scaled_sum, tile.sums[t][v]);
          }
        }
      }
    }
  }
};

// 6-bit weights in groups of 16 x int16 activations.
struct Q6k {
  template <int kTokens, int kVectors>
  QUIRE_INLINE void run(const uint8_t* panel, const Activation& in, int first, int vector,
                        Tile<kTokens, kVectors>& tile, Fetch& fetch) {
    const int16_t* x = in.int16 + size_t(first) * in.k;
    const int groups = in.k / 256;
    for (int g = 0; g < groups; g++, panel += panel_bytes(kQ6k, 256)) {
      const uint16_t* d = (const uint16_t*)panel + vector * kLanes;
      const int8_t* steps = (const int8_t*)panel + 64 + vector * kLanes;
      const uint8_t* w = panel + kQ6kHeader + vector * kLanes * 4;
      if constexpr (kTokens == 1) stream_ahead<kQ6kHeader>(panel);
      if constexpr (kTokens > 1) fetch_beside(fetch, kQ6kHeader);
      for (int part = 0; part < 16; part++, x += 16, steps += kPanelRows, w += 384) {
        if constexpr (kTokens == 1) stream_ahead<384>(w);
        if constexpr (kTokens > 1) fetch_beside(fetch, 384);
        FineDot dots[kTokens][kVectors];
        QUIRE_UNROLL for (int t = 0; t < kTokens; t++) {
          QUIRE_UNROLL for (int v = 0; v < kVectors; v++) clear(dots[t][v]);
        }
        QUIRE_UNROLL for (int quad = 0; quad < 4; quad++) {
          FineWeights weights[kVectors];
          QUIRE_UNROLL for (int v = 0; v < kVectors; v++) weights[v] = six_bits(w + v * kLanes * 4, quad);
          QUIRE_UNROLL for (int t = 0; t < kTokens; t++) {
            const int8_t* quads = (const int8_t*)(x + size_t(t) * in.k + quad * 4);
            const B even = splat_quad(quads), odd = splat_quad(quads + 4);
            QUIRE_UNROLL for (int v = 0; v < kVectors; v++) accumulate(dots[t][v], weights[v], even, odd);
          }
        }
        F scales[kVectors];
        QUIRE_UNROLL for (int v = 0; v < kVectors; v++) {
          scales[v] = mul(load_half(d + v * kLanes), load_int8(steps + v * kLanes));
        }
        QUIRE_UNROLL for (int t = 0; t < kTokens; t++) {
          const F scale = splat(in.int16_scale[(size_t(g) * 8 + part / 2) * in.stride + first + t]);
          QUIRE_UNROLL for (int v = 0; v < kVectors; v++) {
            tile.sums[t][v] = fma(scales[v], mul(to_float(total(dots[t][v])), scale), tile.sums[t][v]);
          }
        }
      }
    }
  }
};

}  // namespace quire::QUIRE_ISA
