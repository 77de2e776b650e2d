#include "kernels/matmul/store.h"
#include "kernels/paged_attention/cpu.h"
#include "kernels/paged_attention/int8_block.h"
#include "kernels/paged_attention/rows.h"
#include "kernels/simd/simd.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr float kLowest = -3.0e38f;

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

// scores[r][32] = queries . keys of one block for kRows rows; queries [r][half][2].
template <int kFormat, int kRows>
QUIRE_INLINE void score_rows(Block<kFormat> block, const Rows& rows, int row, const float* const* queries,
                             float* scores, const uint8_t* next) {
  F sums[kRows][kPanelVectors];
  QUIRE_UNROLL for (int r = 0; r < kRows; r++) {
    QUIRE_UNROLL for (int v = 0; v < kPanelVectors; v++) sums[r][v] = zero();
  }
  for (int d = 0; d < rows.half; d++) {
    if (next) {
      QUIRE_UNROLL for (int i = 0; i < Block<kFormat>::kKeyRowBytes; i += 64) {
        prefetch_far(next + size_t(d) * Block<kFormat>::kKeyRowBytes + i);
      }
    }
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

template <int kFormat, int kRows>
__attribute__((noinline)) void score_tile(Block<kFormat> block, const AttentionLayer& layer, const AttentionWork& work,
                                          const Rows& rows, int row, float* scores, const uint8_t* next) {
  const float* queries[kRows];
  for (int r = 0; r < kRows; r++) {
    queries[r] = kFormat == kKvInt4 ? rows.queries + size_t(row + r) * rows.half * 2 : query(layer, work, row + r);
  }
  score_rows<kFormat, kRows>(block, rows, row, queries, scores, next);
}

// mixed[r][32 dims from `dim` on] += weights . values of one block; weights [r][stride].
template <int kFormat, int kRows>
__attribute__((noinline)) void mix_tile(Block<kFormat> block, const Rows& rows, int row, int dim, const float* weights,
                                        int stride, [[maybe_unused]] const uint16_t* narrow, float* mixed_rows,
                                        const uint8_t* next) {
  const int size = 2 * rows.half;
  F sums[kRows][kPanelVectors];
  QUIRE_UNROLL for (int r = 0; r < kRows; r++) {
    QUIRE_UNROLL for (int v = 0; v < kPanelVectors; v++) {
      sums[r][v] = load(mixed_rows + size_t(row + r) * size + dim + v * kLanes);
    }
  }
  for (int t = 0; t < kBlockTokens / 2; t++) {
    if (next) {
      constexpr int kBytes = Block<kFormat>::kKeyRowBytes;  // values of 32 dims of two tokens take as much
      const uint8_t* at = next + size_t(t) * (size_t(size) / 32) * kBytes + size_t(dim) / 32 * kBytes;
      QUIRE_UNROLL for (int i = 0; i < kBytes; i += 64) prefetch_far(at + i);
    }
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
  const float* scales = block.key_scales(block);
  for (int row = 0; row < rows.count; row++) {
    const float* q = query(layer, work, row);
    float* out = rows.queries + size_t(row) * rows.half * 2;
    float constant = 0.0f;
    for (int d = 0; d < rows.half; d++) {
      out[2 * d] = q[2 * d] * scales[d];
      out[2 * d + 1] = q[2 * d + 1] * scales[rows.half + d];
      constant += q[2 * d] * scales[2 * rows.half + d] + q[2 * d + 1] * scales[3 * rows.half + d];
    }
    rows.constants[row] = constant;
  }
}

// The same for values and probabilities.
void scale_weights(Block<kKvInt4> block, const Rows& rows, const float* weights) {
  const float* scales = block.value_scales(block);
  for (int row = 0; row < rows.count; row++) {
    float constant = 0.0f;
    for (int t = 0; t < kBlockTokens; t++) {
      const float p = weights[size_t(row) * kScoreStride + t];
      rows.weights[row * kBlockTokens + t] = p * scales[t];
      constant += p * scales[kBlockTokens + t];
    }
    rows.constants[row] = constant;
  }
}

void score_int8_block(Block<kKvInt8> block, const AttentionLayer& layer, const AttentionWork& work, const Rows& rows,
                      float* scores, const uint8_t* next) {
  const int size = 2 * rows.half;
  const float* scales = block.key_scales(block);
  int16_t* fine = (int16_t*)rows.queries;
  for (int row = 0; row < rows.count; row++) {
    const float* q = query(layer, work, row);
    float* plain = rows.state;  // free until the split's scores are complete
    for (int d = 0; d < rows.half; d++) {
      plain[d] = q[2 * d] * scales[d];
      plain[rows.half + d] = q[2 * d + 1] * scales[rows.half + d];
    }
    rows.constants[row] = quantize_finely(plain, size, fine + size_t(row) * size);
  }
  for_row_tiles(rows.count, [&]<int kRows>(int row) {
    multiply_block_quads<kRows, false>(size / 4, fine + size_t(row) * size, size, rows.constants + row,
                                       scores + size_t(row) * kScoreStride, kScoreStride, row == 0 ? next : nullptr,
                                       128, [&](int i, int v) { return block.key_quads(block, i, v * kLanes); });
  });
}

void mix_int8_block(Block<kKvInt8> block, const Rows& rows, const float* weights, float* out, const uint8_t* next) {
  const int size = 2 * rows.half;
  const float* scales = block.value_scales(block);
  int16_t* fine = (int16_t*)rows.weights;
  for (int row = 0; row < rows.count; row++) {
    float plain[kBlockTokens];
    for (int t = 0; t < kBlockTokens; t += kLanes) {
      store(plain + t, mul(load(weights + size_t(row) * kScoreStride + t), load(scales + t)));
    }
    rows.constants[row] = quantize_finely(plain, kBlockTokens, fine + row * kBlockTokens);
  }
  if (next) next += key_bytes(kKvInt8, rows.half);
  for (int dim = 0; dim < size; dim += kPanelRows) {
    for_row_tiles(rows.count, [&]<int kRows>(int row) {
      multiply_block_quads<kRows, true>(kBlockTokens / 4, fine + row * kBlockTokens, kBlockTokens, rows.constants + row,
                                        out + size_t(row) * size + dim, size_t(size),
                                        next && row == 0 ? next + dim * 4 : nullptr, size_t(size) * 4,
                                        [&](int i, int v) { return block.value_quads(block, i, dim + v * kLanes); });
    });
  }
}

template <int kFormat>
void score_block(Block<kFormat> block, const AttentionLayer& layer, const AttentionWork& work, const Rows& rows,
                 float* scores, const uint8_t* next) {
  if constexpr (kFormat == kKvInt4) scale_queries(block, layer, work, rows);
  for_row_tiles(rows.count, [&]<int kRows>(int row) {
    score_tile<kFormat, kRows>(block, layer, work, rows, row, scores + size_t(row) * kScoreStride,
                               row == 0 ? next : nullptr);
  });
}

template <int kFormat>
void mix_block(Block<kFormat> block, const Rows& rows, const float* weights, const uint16_t* narrow, float* out,
               const uint8_t* next) {
  int stride = kScoreStride;
  if constexpr (kFormat == kKvInt4) {
    scale_weights(block, rows, weights);
    weights = rows.weights;
    stride = kBlockTokens;
  }
  if (next) next += key_bytes(kFormat, rows.half);
  for (int dim = 0; dim < 2 * rows.half; dim += kPanelRows) {
    for_row_tiles(rows.count, [&]<int kRows>(int row) {
      mix_tile<kFormat, kRows>(block, rows, row, dim, weights, stride, narrow, out, row == 0 ? next : nullptr);
    });
  }
}

const uint8_t* block_at(const AttentionLayer& layer, const AttentionWork& work, int index) {
  const int format = work.formats[index];
  const KvPool& pool = layer.pools[format];
  return pool.base + size_t(work.blocks[index]) * pool.stride + work.kv_head * head_bytes(format, layer.half);
}

// Scores to probabilities 2^(score - maximum), zero from `count` to `end`; returns their sum.
float softmax_row(float* scores, uint16_t* narrow, int count, int end, float* maximum) {
  F most = splat(kLowest);
  for (int i = 0; i < count; i += kLanes) {
    most = max(select(first_lanes(count - i), load(scores + i), splat(kLowest)), most);
  }
  *maximum = reduce_max(most);
  const F top = splat(*maximum);
  F sum = zero();
  for (int i = 0; i < end; i += kLanes) {
    const F p = select(first_lanes(count - i), exp2(sub(load(scores + i), top)), zero());
    sum = add(sum, p);
    store(scores + i, p);
  }
  if constexpr (kBf16Products) {
    for (int i = 0; i < end; i++) narrow[i] = to_bf16(scores[i]);
  }
  return reduce_add(sum);
}

// One split of all rows into `state`.
void run_split(const AttentionLayer& layer, const AttentionWork& work, const Rows& rows, int split, float* state) {
  const int start = split * kSplitTokens, first = split * kSplitBlocks;
  const int last = visible(layer, work, rows.count - 1, start);  // the last token sees most
  const int blocks = (last + kBlockTokens - 1) / kBlockTokens;
  for (int b = 0; b < blocks; b++) {
    const uint8_t* at = block_at(layer, work, first + b);
    const uint8_t* next = b + 1 < blocks ? block_at(layer, work, first + b + 1) : nullptr;
    float* scores = rows.scores + b * kBlockTokens;
    switch (work.formats[first + b]) {
      case kKvF32:
        score_block<kKvF32>({at, rows.half}, layer, work, rows, scores, next);
        break;
      case kKvBf16:
        score_block<kKvBf16>({at, rows.half}, layer, work, rows, scores, next);
        break;
      case kKvInt8:
        score_int8_block({at, rows.half}, layer, work, rows, scores, next);
        break;
      default:
        score_block<kKvInt4>({at, rows.half}, layer, work, rows, scores, next);
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
    const uint8_t* next = b + 1 < blocks ? block_at(layer, work, first + b + 1) : nullptr;
    const float* weights = rows.scores + b * kBlockTokens;
    const uint16_t* narrow = rows.narrow + b * kBlockTokens;
    switch (work.formats[first + b]) {
      case kKvF32:
        mix_block<kKvF32>({at, rows.half}, rows, weights, narrow, out, next);
        break;
      case kKvBf16:
        mix_block<kKvBf16>({at, rows.half}, rows, weights, narrow, out, next);
        break;
      case kKvInt8:
        mix_int8_block({at, rows.half}, rows, weights, out, next);
        break;
      default:
        mix_block<kKvInt4>({at, rows.half}, rows, weights, narrow, out, next);
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
  if constexpr (kBf16Products) {
    for (int row = 0; row < rows.count; row++) {
      const float* q = query(layer, work, row);
      for (int d = 0; d < 2 * rows.half; d++) rows.bf16[size_t(row) * 2 * rows.half + d] = to_bf16(q[d]);
    }
  }
  return rows;
}

}  // namespace

void attend(const AttentionLayer& layer, const AttentionWork& work, float* scratch) {
  const Rows rows = prepare(layer, work, scratch);
  const int last = layer.positions[work.first_token + work.token_count - 1];
  run_split(layer, work, rows, 0, rows.merged);
  for (int split = 1; split * kSplitTokens <= last; split++) {
    run_split(layer, work, rows, split, rows.state);
    merge(layer, work, rows, split, rows.merged, rows.state);
  }
  finish(layer, work, rows, rows.merged);
}

void attend_split(const AttentionLayer& layer, const AttentionWork& work, int split, float* scratch, float* state) {
  run_split(layer, work, prepare(layer, work, scratch), split, state);
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
