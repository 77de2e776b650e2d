#include "services/executor/native/step.h"

#include <algorithm>
#include <string>

#include "services/executor/native/refuse.h"
#include "services/executor/native/workspace.h"

namespace quire {
namespace {

// 64 MiB. Beyond that, pieces of work stay whole: the bits are the same.
constexpr size_t kStateFloatsAtMost = size_t(16) << 20;

}  // namespace

void check(const StepInputs& inputs, const Shape& shape, const int (&block_counts)[kKvFormatCount], int hot_format) {
  const int tokens = inputs.tokens(), sequences = inputs.sequences();
  if (tokens == 0) refuse("token_ids is empty");
  if (int(inputs.positions.size()) != tokens) refuse("positions and token_ids differ in length");
  if (int(inputs.query_starts.size()) != sequences + 1) refuse("query_starts must have one entry more than sequences");
  if (inputs.block_tables.size() != size_t(sequences) * size_t(inputs.table_width)) {
    refuse("block_tables does not have a row per sequence");
  }
  if (inputs.query_starts[0] != 0 || inputs.query_starts[sequences] != tokens)
    refuse("query_starts must span all tokens");
  for (int i = 0; i < tokens; i++) {
    if (inputs.token_ids[i] < 0 || inputs.token_ids[i] >= shape.vocab_size) {
      refuse("token_ids[" + std::to_string(i) + "] is " + std::to_string(inputs.token_ids[i]) + ", not in 0.." +
             std::to_string(shape.vocab_size - 1));
    }
  }
  for (int s = 0; s < sequences; s++) {
    const std::string name = "sequence " + std::to_string(s);
    const int first = inputs.query_starts[s], end = inputs.query_starts[s + 1], context = inputs.context_lengths[s];
    if (end <= first || end > tokens) refuse(name + " has no tokens");
    const int count = end - first;
    if (context < count || context > shape.context_length) refuse(name + " has a context length out of range");
    for (int i = 0; i < count; i++) {
      if (inputs.positions[first + i] != context - count + i)
        refuse(name + ": positions do not end at its context length");
    }
    const int blocks = (context + kBlockTokens - 1) / kBlockTokens;
    if (blocks > inputs.table_width)
      refuse(name + " needs " + std::to_string(blocks) + " blocks, its table is shorter");
    for (int b = 0; b < blocks; b++) {
      const size_t at = size_t(s) * inputs.table_width + b;
      const int format = inputs.block_formats ? inputs.block_formats[at] : hot_format;
      if (format >= kKvFormatCount || inputs.block_tables[at] < 0 || inputs.block_tables[at] >= block_counts[format]) {
        refuse(name + ": block " + std::to_string(b) + " is not one of the pool's");
      }
      if (format != hot_format && (b + 1) * kBlockTokens > context - count) {
        refuse(name + ": block " + std::to_string(b) + " is written and must be of the hot format");
      }
    }
  }
}

void AttentionPlan::build(const StepInputs& inputs, const Shape& shape, int hot_format, int threads) {
  works_.clear();
  splits_.clear();
  split_counts_.clear();
  state_floats_ = 0;
  hot_formats_.assign(std::max(hot_formats_.size(), size_t(inputs.table_width)), uint8_t(hot_format));
  const int group = shape.heads / shape.kv_heads, per_work = std::max(1, kUnitRows / group);
  bool is_split = false;
  for (int s = 0; s < inputs.sequences(); s++) {
    const int end = inputs.query_starts[s + 1];
    AttentionWork work;
    work.blocks = inputs.block_tables.data() + size_t(s) * inputs.table_width;
    work.formats = inputs.block_formats ? inputs.block_formats + size_t(s) * inputs.table_width : hot_formats_.data();
    for (int first = inputs.query_starts[s]; first < end; first += per_work) {
      work.first_token = first;
      work.token_count = std::min(per_work, end - first);
      const int splits = inputs.positions[first + work.token_count - 1] / kSplitTokens + 1;
      is_split |= splits > 1;
      for (work.kv_head = 0; work.kv_head < shape.kv_heads; work.kv_head++) {
        works_.push_back(work);
        split_counts_.push_back(splits);
      }
    }
  }
  if (!is_split || int(works_.size()) >= 8 * threads) return;
  for (size_t w = 0; w < works_.size(); w++) {
    for (int i = 0; i < split_counts_[w]; i++) splits_.push_back({int(w), i, state_floats_});
    state_floats_ += state_floats(works_[w].token_count * group, shape.half) * size_t(split_counts_[w]);
  }
  if (state_floats_ > kStateFloatsAtMost) {
    splits_.clear();
    state_floats_ = 0;
    return;
  }
  if (works_.size() > left_capacity_) {
    left_ = std::make_unique<std::atomic<int>[]>(works_.size());
    left_capacity_ = works_.size();
  }
  for (size_t w = 0; w < works_.size(); w++) left_[w].store(split_counts_[w], std::memory_order_relaxed);
}

bool AttentionPlan::finish_split(int work) {
  if (left_[size_t(work)].fetch_sub(1, std::memory_order_acq_rel) != 1) return false;
  left_[size_t(work)].store(split_counts_[size_t(work)], std::memory_order_relaxed);  // for the next layer
  return true;
}

}  // namespace quire
