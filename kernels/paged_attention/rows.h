// The query rows of one piece of work: their memory, and their way through register tiles.
#pragma once

#include "kernels/paged_attention/cpu.h"
#include "kernels/simd/simd.h"

namespace quire::QUIRE_ISA {

constexpr int kScoreStride = kSplitTokens + 16;  // not a power of two: rows must not share cache sets

// A thread's memory for the query rows of one piece of work.
struct Rows {
  int count, half;
  float* scores;     // [rows][kScoreStride]; then probabilities
  uint16_t* narrow;  // [rows][kScoreStride] probabilities as bf16
  float* plain;      // [rows][2 * half] queries in the order of dims, where there are int8 blocks
  float* queries;    // times a block's scales of keys: [rows][half][2], for int8 as int16 [rows][2 * half]
  uint16_t* bf16;    // [rows][half][2] queries as bf16
  float* weights;    // probabilities times a block's scales of values: [rows][32], for int8 as int16
  float* constants;  // [rows] what minima add; int8: the scales of what became int16
  float* state;      // a split's result
  float* merged;     // all splits so far
};

QUIRE_INLINE Rows make_rows(float* scratch, int count, int half) {
  Rows rows{};
  rows.count = count;
  rows.half = half;
  rows.scores = scratch;
  const size_t n = size_t(count), d = 2 * size_t(half);
  float* at = scratch + n * kScoreStride;
  rows.narrow = (uint16_t*)at;
  at += n * kScoreStride;
  rows.plain = at;
  at += n * d;
  rows.queries = at;
  at += n * d;
  rows.bf16 = (uint16_t*)at;
  at += n * d;
  rows.weights = at;
  at += n * kBlockTokens;
  rows.constants = at;
  at += n;
  rows.state = at;
  at += state_floats(count, half);
  rows.merged = at;
  return rows;
}

// A state: [rows] maxima, [rows] sums, [rows][2 * half] weighted values.
QUIRE_INLINE float* maxima(const Rows&, float* state) { return state; }
QUIRE_INLINE float* sums(const Rows& rows, float* state) { return state + rows.count; }
QUIRE_INLINE float* mixed(const Rows& rows, float* state) { return state + 2 * rows.count; }

// Fetches what comes next, a share of it with every turn of a loop.
struct Fetcher {
  const uint8_t* at;
  size_t share;  // bytes
};
QUIRE_INLINE Fetcher make_fetcher(Ahead ahead, int turns) {
  return {ahead.at, unsigned(ahead.bytes) / unsigned(turns)};
}
// kLines: what a share takes where that which comes next has the format of that which is there.
template <int kLines>
QUIRE_INLINE void fetch(Fetcher& fetcher) {
  if (!fetcher.at) return;
  QUIRE_UNROLL for (int i = 0; i < kLines; i++) prefetch_far(fetcher.at + i * 64);
  fetcher.at += fetcher.share;
}

// Calls function<kRows>(row) for all rows, kAttentionRows at a time and then the rest.
template <int kRows, class Function>
QUIRE_INLINE void rest_of_rows(int left, Function tile) {
  if constexpr (kRows > 0) {
    if (left == kRows) {
      tile.template operator()<kRows>();
    } else {
      rest_of_rows<kRows - 1>(left, tile);
    }
  }
}

template <class Function>
QUIRE_INLINE void for_row_tiles(int count, Function function) {
  int row = 0;
  for (; row + kAttentionRows <= count; row += kAttentionRows) {
    function.template operator()<kAttentionRows>(row);
  }
  rest_of_rows<kAttentionRows - 1>(count - row, [&]<int kRows>() { function.template operator()<kRows>(row); });
}

}  // namespace quire::QUIRE_ISA
