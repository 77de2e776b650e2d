// What one step computes, checked and cut into pieces of work before any thread starts.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/paged_attention/cpu.h"
#include "services/executor/native/program.h"

namespace quire {

// A flattened batch: S sequences with T tokens in all, sequence after sequence.
struct StepInputs {
  std::span<const int32_t> token_ids;        // [T]
  std::span<const int32_t> positions;        // [T]
  std::span<const int32_t> query_starts;     // [S + 1]
  std::span<const int32_t> context_lengths;  // [S]
  std::span<const int32_t> block_tables;     // [S][table_width]
  int table_width = 0;
  const uint8_t* block_formats = nullptr;  // [S][table_width]; null: all are hot

  int tokens() const { return int(token_ids.size()); }
  int sequences() const { return int(context_lengths.size()); }
};

// Throws std::invalid_argument naming what does not fit the shape or the `block_counts` of each KV format.
void check(const StepInputs& inputs, const Shape& shape, const int (&block_counts)[kKvFormatCount], int hot_format);

// Attention of a step, the same for every layer: pieces of work, and for few long contexts their splits.
class AttentionPlan {
 public:
  struct Split {
    int work;
    int index;
    size_t state;  // offset in floats of the work's first state
  };

  void build(const StepInputs& inputs, const Shape& shape, int hot_format, int threads);

  std::span<const AttentionWork> works() const { return works_; }
  // Empty where whole pieces of work keep all threads busy.
  std::span<const Split> splits() const { return splits_; }
  int split_count(int work) const { return split_counts_[size_t(work)]; }
  size_t state_floats_needed() const { return state_floats_; }
  // Counts a finished split; true for the last of its work, which then merges.
  bool finish_split(int work);

 private:
  std::vector<AttentionWork> works_;
  std::vector<Split> splits_;
  std::vector<int> split_counts_;
  std::vector<uint8_t> hot_formats_;
  std::unique_ptr<std::atomic<int>[]> left_;
  size_t left_capacity_ = 0, state_floats_ = 0;
};

}  // namespace quire
