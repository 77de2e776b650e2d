// Panels of a packed matrix times a few tokens, one tile of registers at a time.
//
// The order of operations of one output is the same for every tile shape, so results do not depend on the batch.

#include "kernels/matmul/cpu.h"
#include "kernels/matmul/k_quants.h"
#include "kernels/matmul/store.h"
#include "kernels/matmul/tile.h"
#include "kernels/simd/simd.h"

namespace quire::QUIRE_ISA {
namespace {

struct F32 {
  template <int kTokens, int kVectors>
  QUIRE_INLINE void run(const uint8_t* panel, const Activation& in, int first, int vector,
                        Tile<kTokens, kVectors>& tile, Fetch& fetch) {
    const float* w = (const float*)panel + vector * kLanes;
    const float* x = in.values + size_t(first) * in.k;
    for (int k = 0; k < in.k; k++, w += kPanelRows) {
      if constexpr (kTokens == 1) prefetch(w + kStreamAhead / 4);
      if constexpr (kTokens > 1) fetch_beside(fetch, 128);
      F row[kVectors];
      QUIRE_UNROLL for (int v = 0; v < kVectors; v++) row[v] = load(w + v * kLanes);
      QUIRE_UNROLL for (int t = 0; t < kTokens; t++) {
        const F value = splat(x[size_t(t) * in.k + k]);
        QUIRE_UNROLL for (int v = 0; v < kVectors; v++) tile.sums[t][v] = fma(row[v], value, tile.sums[t][v]);
      }
    }
  }
};

struct Bf16 {
  template <int kTokens, int kVectors>
  QUIRE_INLINE void run(const uint8_t* panel, const Activation& in, int first, int vector,
                        Tile<kTokens, kVectors>& tile, Fetch& fetch) {
    const uint16_t* w = (const uint16_t*)panel + vector * kLanes * 2;
#if QUIRE_LEVEL >= 3
    const uint16_t* x = in.bf16 + size_t(first) * in.k;
    for (int k = 0; k < in.k; k += 2, w += 2 * kPanelRows) {
      if constexpr (kTokens == 1) stream_ahead<128>((const uint8_t*)w);
      if constexpr (kTokens > 1) fetch_beside(fetch, 128);
      QUIRE_UNROLL for (int t = 0; t < kTokens; t++) {
        const B value = splat_quad((const int8_t*)(x + size_t(t) * in.k + k));
        QUIRE_UNROLL for (int v = 0; v < kVectors; v++) tile.sums[t][v] =
            multiply_pairs(tile.sums[t][v], w + v * kLanes * 2, value);
      }
    }
#else
    const float* x = in.values + size_t(first) * in.k;
    for (int k = 0; k < in.k; k += 2, w += 2 * kPanelRows) {
      if constexpr (kTokens == 1) stream_ahead<128>((const uint8_t*)w);
      if constexpr (kTokens > 1) fetch_beside(fetch, 128);
      Pairs pairs[kVectors];
      QUIRE_UNROLL for (int v = 0; v < kVectors; v++) pairs[v] = load_pairs(w + v * kLanes * 2);
      QUIRE_UNROLL for (int t = 0; t < kTokens; t++) {
        const F low = splat(x[size_t(t) * in.k + k]), high = splat(x[size_t(t) * in.k + k + 1]);
        QUIRE_UNROLL for (int v = 0; v < kVectors; v++) {
          tile.sums[t][v] = fma(pairs[v].high, high, fma(pairs[v].low, low, tile.sums[t][v]));
        }
      }
    }
#endif
  }
};

// int8 weights, one scale a row, x int8 activations.
struct Int8 {
  template <int kTokens, int kVectors>
  QUIRE_INLINE void run(const uint8_t* panel, const Activation& in, int first, int vector,
                        Tile<kTokens, kVectors>& tile, Fetch& fetch) {
    constexpr int kGroupBytes = 1024;
    const uint8_t* w = panel + vector * kLanes * 4;
    const int8_t* x = in.int8 + size_t(first) * in.k;
    const int groups = in.k / 32;
    for (int g = 0; g < groups; g++, w += kGroupBytes, x += 32) {
      if constexpr (kTokens == 1) stream_ahead<kGroupBytes>(w);
      if constexpr (kTokens > 1) fetch_beside(fetch, kGroupBytes);
      ByteDot dots[kTokens][kVectors];
      QUIRE_UNROLL for (int t = 0; t < kTokens; t++) {
        QUIRE_UNROLL for (int v = 0; v < kVectors; v++) clear(dots[t][v]);
      }
      QUIRE_UNROLL for (int quad = 0; quad < 8; quad++) {
        ByteWeights weights[kVectors];
        QUIRE_UNROLL for (int v = 0; v < kVectors; v++) weights[v] =
            prepare(load_bytes(w + quad * 128 + v * kLanes * 4));
        QUIRE_UNROLL for (int t = 0; t < kTokens; t++) {
          const B values = splat_quad(x + size_t(t) * in.k + quad * 4);
          QUIRE_UNROLL for (int v = 0; v < kVectors; v++) accumulate(dots[t][v], weights[v], values);
        }
      }
      QUIRE_UNROLL for (int t = 0; t < kTokens; t++) {
        const size_t at = size_t(g) * in.stride + first + t;
        const F scale = splat(in.scale[at]);
        QUIRE_UNROLL for (int v = 0; v < kVectors; v++) {
          tile.sums[t][v] = fma(to_float(total(dots[t][v], in.sum[at])), scale, tile.sums[t][v]);
        }
      }
    }
    const float* d = (const float*)(panel + size_t(groups) * kGroupBytes) + vector * kLanes;
    QUIRE_UNROLL for (int v = 0; v < kVectors; v++) {
      const F scale = load(d + v * kLanes);
      QUIRE_UNROLL for (int t = 0; t < kTokens; t++) tile.sums[t][v] = mul(tile.sums[t][v], scale);
    }
  }
};

// int8 weights in groups of 32 x int16 activations.
struct Int8Fine {
  template <int kTokens, int kVectors>
  QUIRE_INLINE void run(const uint8_t* panel, const Activation& in, int first, int vector,
                        Tile<kTokens, kVectors>& tile, Fetch& fetch) {
    constexpr int kGroupBytes = 1088;
    const uint8_t* w = panel + vector * kLanes * 4;
    const int16_t* x = in.int16 + size_t(first) * in.k;
    const int groups = in.k / 32;
    for (int g = 0; g < groups; g++, w += kGroupBytes, x += 32) {
      if constexpr (kTokens == 1) stream_ahead<kGroupBytes>(w);
      if constexpr (kTokens > 1) fetch_beside(fetch, kGroupBytes);
      FineDot dots[kTokens][kVectors];
      QUIRE_UNROLL for (int t = 0; t < kTokens; t++) {
        QUIRE_UNROLL for (int v = 0; v < kVectors; v++) clear(dots[t][v]);
      }
      QUIRE_UNROLL for (int quad = 0; quad < 8; quad++) {
        FineWeights weights[kVectors];
        QUIRE_UNROLL for (int v = 0; v < kVectors; v++) weights[v] = widen(load_bytes(w + quad * 128 + v * kLanes * 4));
        QUIRE_UNROLL for (int t = 0; t < kTokens; t++) {
          const int8_t* quads = (const int8_t*)(x + size_t(t) * in.k + quad * 4);
          const B even = splat_quad(quads), odd = splat_quad(quads + 4);
          QUIRE_UNROLL for (int v = 0; v < kVectors; v++) accumulate(dots[t][v], weights[v], even, odd);
        }
      }
      F scales[kVectors];
      const uint16_t* d = (const uint16_t*)(panel + size_t(g) * kGroupBytes + 1024) + vector * kLanes;
      QUIRE_UNROLL for (int v = 0; v < kVectors; v++) scales[v] = load_half(d + v * kLanes);
      QUIRE_UNROLL for (int t = 0; t < kTokens; t++) {
        const F scale = splat(in.int16_scale[size_t(g) * in.stride + first + t]);
        QUIRE_UNROLL for (int v = 0; v < kVectors; v++) {
          tile.sums[t][v] = fma(scales[v], mul(to_float(total(dots[t][v])), scale), tile.sums[t][v]);
        }
      }
    }
  }
};

// e4m3 weights, widened as they are read.
struct Float8 {
  template <int kTokens, int kVectors>
  QUIRE_INLINE void run(const uint8_t* panel, const Activation& in, int first, int vector,
                        Tile<kTokens, kVectors>& tile, Fetch& fetch) {
    const uint8_t* w = panel + vector * kLanes;
    const float* x = in.values + size_t(first) * in.k;
    const float* d = (const float*)(panel + size_t(in.k) * kPanelRows) + vector * kLanes;
    for (int start = 0; start < in.k; start += kF8Block, d += kPanelRows) {
      const int end = start + kF8Block < in.k ? start + kF8Block : in.k;
      Tile<kTokens, kVectors> block;
      block.clear_all(block);
      for (int k = start; k < end; k += 2, w += 2 * kPanelRows) {
        if constexpr (kTokens == 1) prefetch(w + kStreamAhead);
        if constexpr (kTokens > 1) fetch_beside(fetch, 2 * kPanelRows);
        QUIRE_UNROLL for (int i = 0; i < 2; i++) {
          F row[kVectors];
          QUIRE_UNROLL for (int v = 0; v < kVectors; v++) row[v] = load_f8(w + i * kPanelRows + v * kLanes);
          QUIRE_UNROLL for (int t = 0; t < kTokens; t++) {
            const F value = splat(x[size_t(t) * in.k + k + i]);
            QUIRE_UNROLL for (int v = 0; v < kVectors; v++) block.sums[t][v] = fma(row[v], value, block.sums[t][v]);
          }
        }
      }
      QUIRE_UNROLL for (int v = 0; v < kVectors; v++) {
        const F scale = mul(load(d + v * kLanes), splat(kF8Unit));
        QUIRE_UNROLL for (int t = 0; t < kTokens; t++) tile.sums[t][v] = fma(block.sums[t][v], scale, tile.sums[t][v]);
      }
    }
  }
};

enum class Offset { kMiddle, kMinimum, kZero };  // d * (q - 8), d * q + m, d * (q - z)

// 4-bit weights in groups of 32 * kParts x int8 activations in groups of 32.
template <int kParts, Offset kOffset>
struct Int4 {
  template <int kTokens, int kVectors>
  QUIRE_INLINE void run(const uint8_t* panel, const Activation& in, int first, int vector,
                        Tile<kTokens, kVectors>& tile, Fetch& fetch) {
    constexpr int kNibbleBytes = kParts * 512;
    constexpr int kGroupBytes = kNibbleBytes + (kOffset == Offset::kMinimum ? 128 : kOffset == Offset::kZero ? 96 : 64);
    const uint8_t* w = panel + vector * kLanes * 4;
    const int8_t* x = in.int8 + size_t(first) * in.k;
    const int groups = in.k / 32 / kParts;
    for (int g = 0; g < groups; g++, w += kGroupBytes) {
      F scales[kVectors], offsets[kVectors];
      const uint16_t* d = (const uint16_t*)(panel + size_t(g) * kGroupBytes + kNibbleBytes) + vector * kLanes;
      const int8_t* z = (const int8_t*)panel + size_t(g) * kGroupBytes + kNibbleBytes + 64 + vector * kLanes;
      if constexpr (kParts > 1) {
        QUIRE_UNROLL for (int v = 0; v < kVectors; v++) scales[v] = load_half(d + v * kLanes);
      }
      for (int part = 0; part < kParts; part++, x += 32) {
        if constexpr (kTokens == 1) stream_ahead<kGroupBytes / kParts>(w + part * 512);
        if constexpr (kTokens > 1) fetch_beside(fetch, kGroupBytes / kParts);
        NibbleDot dots[kTokens][kVectors];
        multiply_nibbles(w + part * 512, x, in.k, dots);
        if constexpr (kParts == 1) {
          QUIRE_UNROLL for (int v = 0; v < kVectors; v++) scales[v] = load_half(d + v * kLanes);
        }
        QUIRE_UNROLL for (int v = 0; v < kVectors; v++) {
          if constexpr (kOffset == Offset::kMinimum) offsets[v] = load_half(d + kPanelRows + v * kLanes);
          if constexpr (kOffset == Offset::kZero) offsets[v] = load_int8(z + v * kLanes);
        }
        QUIRE_UNROLL for (int t = 0; t < kTokens; t++) {
          const size_t at = (size_t(g) * kParts + part) * in.stride + first + t;
          const F scale = splat(in.scale[at]);
          const F scaled_sum = splat(kOffset == Offset::kMinimum ? in.scaled_sum[at] : 0.0f);
          const F whole_sum = splat(kOffset == Offset::kZero ? float(in.sum[at]) : 0.0f);
          const I middle = splat_int(kOffset == Offset::kMiddle ? 8 * in.sum[at] : 0);
          QUIRE_UNROLL for (int v = 0; v < kVectors; v++) {
            I sum = total(dots[t][v]);
            if constexpr (kOffset == Offset::kMiddle) sum = sub(sum, middle);
            F value = to_float(sum);
            if constexpr (kOffset == Offset::kZero) value = fnma(offsets[v], whole_sum, value);  // exact
            tile.sums[t][v] = fma(scales[v], mul(value, scale), tile.sums[t][v]);
            if constexpr (kOffset == Offset::kMinimum) tile.sums[t][v] = fma(offsets[v], scaled_sum, tile.sums[t][v]);
          }
        }
      }
    }
  }
};

// Vectors of rows that a tile of so many tokens has.
constexpr int tile_vectors(int tokens) { return tokens <= 2 ? kPanelVectors : kTileVectors; }

template <class Weights, int kTokens>
__attribute__((noinline)) void run_tile(const uint8_t* panel, const Activation& in, int first, float* out,
                                        Fetch& fetch) {
  constexpr int kVectors = tile_vectors(kTokens);
  for (int vector = 0; vector < kPanelVectors; vector += kVectors) {
    Tile<kTokens, kVectors> tile;
    tile.clear_all(tile);
    Weights::run(panel, in, first, vector, tile, fetch);
    tile.store_all(tile, out, vector);
  }
}

template <class Weights>
void run_larger_tile(int count, const uint8_t* panel, const Activation& in, int first, float* out, Fetch& fetch) {
  if (count == 4) return run_tile<Weights, 4>(panel, in, first, out, fetch);
  if constexpr (kTileTokens > 4) {
    if (count == 5) return run_tile<Weights, 5>(panel, in, first, out, fetch);
    run_tile<Weights, 6>(panel, in, first, out, fetch);
  }
}

template <class Weights>
void run_panel(const uint8_t* panel, const Activation& in, int first, int count, float* out, Ahead ahead) {
  const int tiles = (count + kTileTokens - 1) / kTileTokens;
  Fetch fetch{ahead.at, ahead.at + ahead.bytes};  // not for a single token: its weights are streamed
  for (int i = 0; i < tiles; i++) {
    const int from = i * count / tiles, to = (i + 1) * count / tiles;
    fetch.pace = uint32_t((1 << 16) * tile_vectors(to - from) / (kPanelVectors * tiles) + 1);
    float* result = out + from * kPanelRows;
    switch (to - from) {
      case 1:
        run_tile<Weights, 1>(panel, in, first + from, result, fetch);
        break;
      case 2:
        run_tile<Weights, 2>(panel, in, first + from, result, fetch);
        break;
      case 3:
        run_tile<Weights, 3>(panel, in, first + from, result, fetch);
        break;
      default:
        if constexpr (kTileTokens > 3) run_larger_tile<Weights>(to - from, panel, in, first + from, result, fetch);
    }
  }
}

}  // namespace

PanelKernel panel_kernel(int format) {
  static constexpr PanelKernel kernels[kFormatCount] = {
      run_panel<F32>,
      run_panel<Bf16>,
      run_panel<Int8Fine>,
      run_panel<Int8>,
      run_panel<Int4<1, Offset::kMiddle>>,
      run_panel<Int4<2, Offset::kMiddle>>,
      run_panel<Int4<4, Offset::kMiddle>>,
      run_panel<Int4<1, Offset::kMinimum>>,
      run_panel<Int4<2, Offset::kMinimum>>,
      run_panel<Int4<4, Offset::kMinimum>>,
      run_panel<Q4k>,
      run_panel<Q6k>,
      run_panel<Int4<1, Offset::kZero>>,
      run_panel<Int4<2, Offset::kZero>>,
      run_panel<Int4<4, Offset::kZero>>,
      run_panel<Float8>,
  };
  return kernels[format];
}

ActivationForm activation_form(int format) {
  if (format == kF32 || format == kF8) return kFloatForm;
  if (format == kBf16) return kBf16Products ? kBf16Form : kFloatForm;
  return format == kQ8 || format == kQ6k ? kInt16Form : kInt8Form;
}

void quantize_rows(const Activation& out, const float* values, int count) {
  for (int t = 0; t < count; t++) {
    for (int group = 0; group < out.k / kPanelRows; group++) {
      F x[kPanelVectors];
      QUIRE_UNROLL for (int v = 0; v < kPanelVectors; v++) {
        x[v] = load(values + size_t(t) * out.k + group * kPanelRows + v * kLanes);
      }
      store_group(out, kFloatForm | kBf16Form | kInt8Form | kInt16Form, t, group, x);
    }
  }
}

void reorder_group(const Activation& in, ColumnOrder order, const Activation& out, int forms, int count, int group) {
  const int32_t* from = order + group * kPanelRows;
  for (int t = 0; t < count; t++) {
    const float* values = in.values + size_t(t) * in.k;
    float taken[kPanelRows];
    for (int i = 0; i < kPanelRows; i++) taken[i] = from[i] < 0 ? 0.0f : values[from[i]];
    F x[kPanelVectors];
    QUIRE_UNROLL for (int v = 0; v < kPanelVectors; v++) x[v] = load(taken + v * kLanes);
    store_group(out, forms, t, group, x);
  }
}

}  // namespace quire::QUIRE_ISA
