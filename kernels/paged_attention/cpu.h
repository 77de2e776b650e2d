// Attention over paged keys and values, for any mix of prefill chunks and decodes.
//
// A sequence's context is cut into splits of kSplitTokens at fixed positions; inside a split softmax takes two passes,
// and splits are merged in ascending order by log-sum-exp. What a query row computes depends on its own context alone,
// never on which rows, splits or threads share the work.
#pragma once

#include "kernels/matmul/format.h"
#include "kernels/paged_attention/kv_layout.h"

namespace quire {

constexpr int kSplitTokens = 256;
constexpr int kSplitBlocks = kSplitTokens / kBlockTokens;

// Blocks of one format: block b of this layer is at base + b * stride.
struct KvPool {
  uint8_t* base = nullptr;
  size_t stride = 0;
};

struct AttentionLayer {
  int heads = 0, kv_heads = 0, half = 0;
  const float* queries = nullptr;      // [tokens][heads][half][2], scaled by attention scale * log2(e)
  const int32_t* positions = nullptr;  // [tokens]
  KvPool pools[kKvFormatCount];
  Activation* out = nullptr;  // [tokens][heads * 2 * half]
  int forms = 0;
};

// Consecutive tokens of one sequence, the query heads of one kv head.
struct AttentionWork {
  int first_token = 0, token_count = 0, kv_head = 0;
  const int32_t* blocks = nullptr;   // the sequence's block table
  const uint8_t* formats = nullptr;  // per block, of KvFormat
};

// Floats that a thread needs for `rows` query rows; and that the result of one split of them takes.
static constexpr size_t scratch_floats(int rows, int half) {
  return size_t(rows) * (2 * (kSplitTokens + 16) + 10 * size_t(half) + kBlockTokens + 5);
}
static constexpr size_t state_floats(int rows, int half) { return size_t(rows) * (2 * size_t(half) + 2); }

namespace QUIRE_ISA {

// All splits of the rows, merged as they come, into the layer's output. `following` is what the thread is likely to
// do next, or null.
void attend(const AttentionLayer& layer, const AttentionWork& work, const AttentionWork* following, float* scratch);

// One split into `state`; and all `split_count` states [split][state_floats] of the rows into the layer's output.
void attend_split(const AttentionLayer& layer, const AttentionWork& work, int split, float* scratch, float* state);
void merge_splits(const AttentionLayer& layer, const AttentionWork& work, int split_count, const float* states,
                  float* scratch);

}  // namespace QUIRE_ISA
}  // namespace quire
