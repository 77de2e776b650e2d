#include "kernels/matmul/store.h"
#include "kernels/paged_attention/cpu.h"
#include "kernels/paged_attention/int8_block.h"
#include "kernels/paged_attention/rows.h"
#include "kernels/paged_attention/softmax.h"
#include "kernels/simd/simd.h"

namespace quire::QUIRE_ISA {
namespace {

const float* query(const AttentionLayer& layer, const AttentionWork& work, int row) {
  const int group = layer.heads / layer.kv_heads, token = work.first_token + row / group;
  const int head = work.kv_head * group + row % group;
  return layer.queries + (size_t(token) * layer.heads + head) * layer.half * 2;
}

// Row's number of tokens inside the split that begins at `start`; may be zero or less.
QUIRE_INLINE int visible(const AttentionLayer& layer, const AttentionWork& work, int row, int start) {
  const int group = layer.heads / layer.kv_heads;
  const int count = layer.positions[work.first_token + row / group] + 1 - start;
  return count < kSplitTokens ? count : kSplitTokens;
}

// Blocks of a split that any row sees.
int blocks_in(const AttentionLayer& layer, const AttentionWork& work, int split) {
  const int last = work.token_count * (layer.heads / layer.kv_heads) - 1;  // the last token sees most
  const int tokens = visible(layer, work, last, split * kSplitTokens);
  return (tokens + kBlockTokens - 1) / kBlockTokens;
}

// Cache lines that a pair of dims, or of tokens, takes; not for int8.
constexpr int fetch_lines(int format) { return format == kKvF32 ? 4 : format == kKvBf16 ? 2 : 1; }

// scores[r][32] = queries . keys of one block for kRows rows.
template <int kFormat, int kRows>
__attribute__((noinline)) void score_tile(Block<kFormat> block, const AttentionLayer& layer, const AttentionWork& work,
                                          const Rows& rows, int row, float* scores, Ahead ahead) {
  const float* queries[kRows];  // [half][2] each
  for (int r = 0; r < kRows; r++) {
    queries[r] = kFormat == kKvInt4 ? rows.queries + size_t(row + r) * rows.half * 2 : query(layer, work, row + r);
  }
  F sums[kRows][kPanelVectors];
  QUIRE_UNROLL for (int r = 0; r < kRows; r++) {
    QUIRE_UNROLL for (int v = 0; v < kPanelVectors; v++) sums[r][v] = zero();
  }
  Fetcher fetcher = make_fetcher(ahead, rows.half);
  for (int d = 0; d < rows.half; d++) {
    fetch<fetch_lines(kFormat)>(fetcher);
#if QUIRE_LEVEL >= 3
    if constexpr (kFormat == kKvBf16) {
      QUIRE_UNROLL for (int r = 0; r < kRows; r++) {
        const B q = splat_quad((const int8_t*)(rows.bf16 + (size_t(row + r) * rows.half + d) * 2));
        QUIRE_UNROLL for (int v = 0; v < kPanelVectors; v++) {
          sums[r][v] = multiply_pairs(sums[r][v], block.key_pairs(block, d, v * kLanes), q);
        }
      }
      continue;
    }
#endif
    QUIRE_UNROLL for (int v = 0; v < kPanelVectors; v++) {
      const Pairs keys = block.keys(block, d, v * kLanes);
      QUIRE_UNROLL for (int r = 0; r < kRows; r++) {
        sums[r][v] = fma(keys.low, splat(queries[r][2 * d]), sums[r][v]);
        sums[r][v] = fma(keys.high, splat(queries[r][2 * d + 1]), sums[r][v]);
      }
    }
  }
  QUIRE_UNROLL for (int r = 0; r < kRows; r++) {
    const F constant = splat(kFormat == kKvInt4 ? rows.constants[row + r] : 0.0f);
    QUIRE_UNROLL for (int v = 0; v < kPanelVectors; v++) {
      store(scores + r * kScoreStride + v * kLanes, kFormat == kKvInt4 ? add(sums[r][v], constant) : sums[r][v]);
    }
  }
}

// mixed[r][32 dims from `dim` on] += weights . values of one block; weights [r][stride].
template <int kFormat, int kRows>
__attribute__((noinline)) void mix_tile(Block<kFormat> block, const Rows& rows, int row, int dim, const float* weights,
                                        int stride, [[maybe_unused]] const uint16_t* narrow, float* mixed_rows,
                                        Ahead ahead) {
  const int size = 2 * rows.half;
  F sums[kRows][kPanelVectors];
  QUIRE_UNROLL for (int r = 0; r < kRows; r++) {
    QUIRE_UNROLL for (int v = 0; v < kPanelVectors; v++) {
      sums[r][v] = load(mixed_rows + size_t(row + r) * size + dim + v * kLanes);
    }
  }
  Fetcher fetcher = make_fetcher(ahead, kBlockTokens / 2);
  for (int t = 0; t < kBlockTokens / 2; t++) {
    fetch<fetch_lines(kFormat)>(fetcher);
#if QUIRE_LEVEL >= 3
    if constexpr (kFormat == kKvBf16) {
      QUIRE_UNROLL for (int r = 0; r < kRows; r++) {
        const B p = splat_quad((const int8_t*)(narrow + size_t(row + r) * kScoreStride + 2 * t));
        QUIRE_UNROLL for (int v = 0; v < kPanelVectors; v++) {
          sums[r][v] = multiply_pairs(sums[r][v], block.value_pairs(block, t, dim + v * kLanes), p);
        }
      }
      continue;
    }
#endif
    QUIRE_UNROLL for (int v = 0; v < kPanelVectors; v++) {
      const Pairs values = block.values(block, t, dim + v * kLanes);
      QUIRE_UNROLL for (int r = 0; r < kRows; r++) {
        const float* p = weights + size_t(row + r) * stride + 2 * t;
        sums[r][v] = fma(values.low, splat(p[0]), sums[r][v]);
        sums[r][v] = fma(values.high, splat(p[1]), sums[r][v]);
      }
    }
  }
  QUIRE_UNROLL for (int r = 0; r < kRows; r++) {
    const F constant = splat(kFormat == kKvInt4 ? rows.constants[row + r] : 0.0f);
    QUIRE_UNROLL for (int v = 0; v < kPanelVectors; v++) {
      store(mixed_rows + size_t(row + r) * size + dim + v * kLanes,
            kFormat == kKvInt4 ? add(sums[r][v], constant) : sums[r][v]);
    }
  }
}

// Folds the scales of a block's keys into the queries, minima into constants.
void scale_queries(Block<kKvInt4> block, const AttentionLayer& layer, const AttentionWork& work, const Rows& rows) {
  const uint16_t *scales = block.key_scales(block), *minima = scales + 2 * rows.half;
  for (int row = 0; row < rows.count; row++) {
    const float* q = query(layer, work, row);
    float* out = rows.queries + size_t(row) * rows.half * 2;
    float constant = 0.0f;
    for (int d = 0; d < rows.half; d++) {
      out[2 * d] = q[2 * d] * from_bf16(scales[d]);
      out[2 * d + 1] = q[2 * d + 1] * from_bf16(scales[rows.half + d]);
      constant += q[2 * d] * from_bf16(minima[d]) + q[2 * d + 1] * from_bf16(minima[rows.half + d]);
    }
    rows.constants[row] = constant;
  }
}

// The same for values and probabilities.
void scale_weights(Block<kKvInt4> block, const Rows& rows, const float* weights) {
  const uint16_t* scales = block.value_scales(block);
  for (int row = 0; row < rows.count; row++) {
    float constant = 0.0f;
    for (int t = 0; t < kBlockTokens; t++) {
      const float p = weights[size_t(row) * kScoreStride + t];
      rows.weights[row * kBlockTokens + t] = p * from_bf16(scales[t]);
      constant += p * from_bf16(scales[kBlockTokens + t]);
    }
    rows.constants[row] = constant;
  }
}

void score_int8_block(Block<kKvInt8> block, const Rows& rows, float* scores, Ahead ahead) {
  const int size = 2 * rows.half;
  const uint16_t* scales = block.key_scales(block);
  int16_t* fine = (int16_t*)rows.queries;
  for_row_tiles(rows.count, [&]<int kRows>(int row) {
    fold_scales<kRows>(rows.plain + size_t(row) * size, size, scales, size, fine + size_t(row) * size,
                       rows.constants + row);
    multiply_block_quads<kRows, false>(size / 4, fine + size_t(row) * size, size, rows.constants + row,
                                       scores + size_t(row) * kScoreStride, kScoreStride, row == 0 ? ahead : Ahead{},
                                       [&](int i, int v) { return block.key_quads(block, i, v * kLanes); });
  });
}

// The part of `ahead` that belongs to 32 of `size` dims.
Ahead share(Ahead ahead, int dim, int size) {
  if (!ahead.at) return ahead;
  return {ahead.at + ahead.bytes * size_t(dim) / size_t(size), ahead.bytes * kPanelRows / size_t(size)};
}

void mix_int8_block(Block<kKvInt8> block, const Rows& rows, const float* weights, float* out, Ahead ahead) {
  const int size = 2 * rows.half;
  const uint16_t* scales = block.value_scales(block);
  int16_t* fine = (int16_t*)rows.weights;
  for_row_tiles(rows.count, [&]<int kRows>(int row) {
    fold_scales<kRows>(weights + size_t(row) * kScoreStride, kScoreStride, scales, kBlockTokens,
                       fine + row * kBlockTokens, rows.constants + row);
  });
  for (int dim = 0; dim < size; dim += kPanelRows) {
    for_row_tiles(rows.count, [&]<int kRows>(int row) {
      multiply_block_quads<kRows, true>(kBlockTokens / 4, fine + row * kBlockTokens, kBlockTokens, rows.constants + row,
                                        out + size_t(row) * size + dim, size_t(size),
                                        row == 0 ? share(ahead, dim, size) : Ahead{},
                                        [&](int i, int v) { return block.value_quads(block, i, dim + v * kLanes); });
    });
  }
}

template <int kFormat>
void score_block(Block<kFormat> block, const AttentionLayer& layer, const AttentionWork& work, const Rows& rows,
                 float* scores, Ahead ahead) {
  if constexpr (kFormat == kKvInt4) scale_queries(block, layer, work, rows);
  for_row_tiles(rows.count, [&]<int kRows>(int row) {
    score_tile<kFormat, kRows>(block, layer, work, rows, row, scores + size_t(row) * kScoreStride,
                               row == 0 ? ahead : Ahead{});
  });
}

template <int kFormat>
void mix_block(Block<kFormat> block, const Rows& rows, const float* weights, const uint16_t* narrow, float* out,
               Ahead ahead) {
  int stride = kScoreStride;
  if constexpr (kFormat == kKvInt4) {
    scale_weights(block, rows, weights);
    weights = rows.weights;
    stride = kBlockTokens;
  }
  for (int dim = 0; dim < 2 * rows.half; dim += kPanelRows) {
    for_row_tiles(rows.count, [&]<int kRows>(int row) {
      mix_tile<kFormat, kRows>(block, rows, row, dim, weights, stride, narrow, out,
                               row == 0 ? share(ahead, dim, 2 * rows.half) : Ahead{});
    });
  }
}

const uint8_t* block_at(const AttentionLayer& layer, const AttentionWork& work, int index) {
  const int format = work.formats[index];
  const KvPool& pool = layer.pools[format];
  return pool.base + size_t(work.blocks[index]) * pool.stride + work.kv_head * head_bytes(format, layer.half);
}

Ahead keys_of(const AttentionLayer& layer, const AttentionWork& work, int index) {
  return {block_at(layer, work, index), key_bytes(work.formats[index], layer.half)};
}

Ahead values_of(const AttentionLayer& layer, const AttentionWork& work, int index) {
  const size_t keys = key_bytes(work.formats[index], layer.half);
  return {block_at(layer, work, index) + keys, value_bytes(work.formats[index], layer.half)};
}

// What a thread reads after a split: the first blocks of the next one, or of the next piece of work.
struct After {
  const AttentionWork* work = nullptr;
  int first = 0, blocks = 0;
};

// What is read kAhead turns after turn `turn` of a split: its keys take `blocks` turns, then its values as many.
constexpr int kAhead = 2;
Ahead ahead_of(const AttentionLayer& layer, const AttentionWork& work, int first, int blocks, int turn, After after) {
  turn += kAhead;
  if (turn < blocks) return keys_of(layer, work, first + turn);
  if (turn < 2 * blocks) return values_of(layer, work, first + turn - blocks);
  turn -= 2 * blocks;
  return turn < after.blocks ? keys_of(layer, *after.work, after.first + turn) : Ahead{};
}

// One split of all rows into `state`.
void run_split(const AttentionLayer& layer, const AttentionWork& work, const Rows& rows, int split, float* state,
               After after) {
  const int start = split * kSplitTokens, first = split * kSplitBlocks, blocks = blocks_in(layer, work, split);
  for (int b = 0; b < blocks; b++) {
    const uint8_t* at = block_at(layer, work, first + b);
    const Ahead ahead = ahead_of(layer, work, first, blocks, b, after);
    float* scores = rows.scores + b * kBlockTokens;
    switch (work.formats[first + b]) {
      case kKvF32:
        score_block<kKvF32>({at, rows.half}, layer, work, rows, scores, ahead);
        break;
      case kKvBf16:
        score_block<kKvBf16>({at, rows.half}, layer, work, rows, scores, ahead);
        break;
      case kKvInt8:
        score_int8_block({at, rows.half}, rows, scores, ahead);
        break;
      default:
        score_block<kKvInt4>({at, rows.half}, layer, work, rows, scores, ahead);
    }
  }
  for (int row = 0; row < rows.count; row++) {
    const int count = visible(layer, work, row, start);
    float* scores = rows.scores + size_t(row) * kScoreStride;
    sums(rows, state)[row] = softmax_row(scores, rows.narrow + size_t(row) * kScoreStride, count > 0 ? count : 0,
                                         blocks * kBlockTokens, &maxima(rows, state)[row]);
  }
  float* out = mixed(rows, state);
  memset(out, 0, size_t(rows.count) * rows.half * 2 * sizeof(float));
  for (int b = 0; b < blocks; b++) {
    const uint8_t* at = block_at(layer, work, first + b);
    const Ahead ahead = ahead_of(layer, work, first, blocks, blocks + b, after);
    const float* weights = rows.scores + b * kBlockTokens;
    const uint16_t* narrow = rows.narrow + b * kBlockTokens;
    switch (work.formats[first + b]) {
      case kKvF32:
        mix_block<kKvF32>({at, rows.half}, rows, weights, narrow, out, ahead);
        break;
      case kKvBf16:
        mix_block<kKvBf16>({at, rows.half}, rows, weights, narrow, out, ahead);
        break;
      case kKvInt8:
        mix_int8_block({at, rows.half}, rows, weights, out, ahead);
        break;
      default:
        mix_block<kKvInt4>({at, rows.half}, rows, weights, narrow, out, ahead);
    }
  }
}

// merged += state, for the rows that see anything of that split.
void merge(const AttentionLayer& layer, const AttentionWork& work, const Rows& rows, int split, float* merged,
           const float* state) {
  for (int row = 0; row < rows.count; row++) {
    if (visible(layer, work, row, split * kSplitTokens) <= 0) continue;
    float& most = maxima(rows, merged)[row];
    const float other = state[row];
    const float top = most > other ? most : other;
    float factors[2 * kLanes];
    store(factors, exp2(splat(most - top)));
    store(factors + kLanes, exp2(splat(other - top)));
    const float mine = factors[0], theirs = factors[kLanes];
    most = top;
    sums(rows, merged)[row] = sums(rows, merged)[row] * mine + state[rows.count + row] * theirs;
    float* out = mixed(rows, merged) + size_t(row) * rows.half * 2;
    const float* in = state + 2 * rows.count + size_t(row) * rows.half * 2;
    for (int d = 0; d < 2 * rows.half; d += kLanes) {
      store(out + d, add(mul(load(out + d), splat(mine)), mul(load(in + d), splat(theirs))));
    }
  }
}

void finish(const AttentionLayer& layer, const AttentionWork& work, const Rows& rows, float* state) {
  const int group = layer.heads / layer.kv_heads, groups_per_head = layer.half / 16;
  for (int row = 0; row < rows.count; row++) {
    const F inverse = splat(1.0f / sums(rows, state)[row]);
    const float* in = mixed(rows, state) + size_t(row) * rows.half * 2;
    const int head = work.kv_head * group + row % group;
    for (int g = 0; g < groups_per_head; g++) {
      F values[kPanelVectors];
      QUIRE_UNROLL for (int v = 0; v < kPanelVectors; v++) {
        values[v] = mul(load(in + g * kPanelRows + v * kLanes), inverse);
      }
      store_group(*layer.out, layer.forms, work.first_token + row / group, head * groups_per_head + g, values);
    }
  }
}

Rows prepare(const AttentionLayer& layer, const AttentionWork& work, float* scratch) {
  const Rows rows = make_rows(scratch, work.token_count * (layer.heads / layer.kv_heads), layer.half);
  const size_t size = 2 * size_t(rows.half);
  for (int row = 0; row < rows.count; row++) {
    const float* q = query(layer, work, row);
    if constexpr (kBf16Products) {
      for (size_t d = 0; d < size; d++) rows.bf16[size_t(row) * size + d] = to_bf16(q[d]);
    }
    if (layer.pools[kKvInt8].base) {
      for (int d = 0; d < rows.half; d++) {
        rows.plain[size_t(row) * size + d] = q[2 * d];
        rows.plain[size_t(row) * size + rows.half + d] = q[2 * d + 1];
      }
    }
  }
  return rows;
}

}  // namespace

void attend(const AttentionLayer& layer, const AttentionWork& work, const AttentionWork* following, float* scratch) {
  const Rows rows = prepare(layer, work, scratch);
  const int splits = layer.positions[work.first_token + work.token_count - 1] / kSplitTokens + 1;
  for (int split = 0; split < splits; split++) {
    const After after = split + 1 < splits ? After{&work, (split + 1) * kSplitBlocks, blocks_in(layer, work, split + 1)}
                        : following        ? After{following, 0, blocks_in(layer, *following, 0)}
                                           : After{};
    run_split(layer, work, rows, split, split == 0 ? rows.merged : rows.state, after);
    if (split > 0) merge(layer, work, rows, split, rows.merged, rows.state);
  }
  finish(layer, work, rows, rows.merged);
}

void attend_split(const AttentionLayer& layer, const AttentionWork& work, int split, float* scratch, float* state) {
  run_split(layer, work, prepare(layer, work, scratch), split, state, {});
}

void merge_splits(const AttentionLayer& layer, const AttentionWork& work, int split_count, const float* states,
                  float* scratch) {
  const Rows rows = make_rows(scratch, work.token_count * (layer.heads / layer.kv_heads), layer.half);
  const size_t size = state_floats(rows.count, rows.half);
  memcpy(rows.merged, states, size * sizeof(float));
  for (int split = 1; split < split_count; split++) {
    merge(layer, work, rows, split, rows.merged, states + size_t(split) * size);
  }
  finish(layer, work, rows, rows.merged);
}

}  // namespace quire::QUIRE_ISA
