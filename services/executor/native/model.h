// A loaded model: a program, its keys and values, and the threads that run it.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "kernels/table/table.h"
#include "services/executor/native/memory.h"
#include "services/executor/native/pool.h"
#include "services/executor/native/program.h"
#include "services/executor/native/step.h"
#include "services/executor/native/workspace.h"

namespace quire {

// A row of a step whose logits are wanted. Consecutive rows of consecutive tokens are multiplied together.
struct WantedRow {
  int token = 0;              // flattened
  bool needs_logits = false;  // else its argmax alone
};

// Consecutive rows of a step whose states, behind the head's norm, are added to `total` one after the other.
struct PooledRows {
  int first = 0, count = 0;  // flattened
  double* total = nullptr;   // [hidden size]
};

// Called once per wanted row, on any thread: row, its logits [vocabulary] or null, its argmax (-1 where not finite, or
// where logits are given), the thread.
using RowSink = std::function<void(int row, float* logits, int32_t argmax, int thread)>;

// Not thread-safe; two models may share a pool and be stepped from two threads.
class Model {
 public:
  // Throws std::invalid_argument naming the operation that does not fit.
  Model(Program program, std::shared_ptr<ThreadPool> pool, const KernelTable& kernels);
  Model(const Model&) = delete;  // its parts refer to each other
  Model& operator=(const Model&) = delete;

  const Shape& shape() const { return program_.shape; }
  int threads() const { return pool_->size(); }
  const KernelTable& kernels() const { return kernels_; }

  // Bytes of one block of all layers.
  size_t block_bytes(int kv_format) const;
  // Makes a pool of blocks: f32 or bf16 is the hot one, narrower formats lie beside it.
  void allocate_kv(int kv_format, int block_count);
  // The pool of that format: its blocks lie one behind the other. Valid until the pool is made anew.
  uint8_t* blocks(int kv_format) const { return kv_[kv_format].data(); }
  int block_count(int kv_format) const { return block_counts_[kv_format]; }
  // Copies whole hot blocks, pairs of source and target, in order. Throws std::invalid_argument, and copies none, where
  // an id is not one of the pool's.
  void copy_blocks(std::span<const int32_t> pairs);
  // The same with full blocks, hot or int8, into a pool of a narrower format, all threads together; the pairs of a call
  // are independent of each other.
  void narrow_blocks(std::span<const int32_t> pairs, int from, int to);

  // Computes the step; `sink` gets every wanted row. The head follows the first `layers` layers, 0 for all: later ones
  // have no keys and values of these tokens then. Throws std::invalid_argument before anything is computed.
  void step(const StepInputs& inputs, std::span<const WantedRow> wanted, const RowSink& sink, int layers = 0,
            std::span<const PooledRows> pooled = {});

 private:
  // Consecutive wanted rows that are consecutive tokens.
  struct Run {
    int row, token, count;
  };

  void check_pairs(std::span<const int32_t> pairs, int from, int to) const;
  void run(int thread);
  void embed(const Op& op, size_t index, int thread);
  void qkv(const Op& op, size_t index, int thread);
  void attention(const Op& op, size_t index, int thread);
  void project(const Op& op, size_t index, int thread);
  void gate_up(const Op& op, size_t index, int thread);
  void head(const Op& op, int thread);
  void pool_states(const float* gains, const float* inverse_rms, int thread);

  NormFor norm_after(size_t index) const;
  int multiplied_forms(const Op& op) const;
  int written_forms(const Op& op) const;
  Activation inputs_of(const Op& op, const Activation& written, int thread);
  Ahead first_panel_after(size_t index, int thread) const;
  void panel_times_tokens(const Matrix& matrix, int panel, const Activation& in, int first, int count, float* sums,
                          Ahead ahead) const;
  size_t layer_bytes(int format) const;
  void extend_rotations(int positions);
  void choose_ops(int layers);
  void cut_runs(int first_row, int count);

  Program program_;
  std::vector<Op> early_ops_;  // of a part of the layers
  std::shared_ptr<ThreadPool> pool_;
  const KernelTable& kernels_;
  Workspace space_;
  AttentionPlan attention_;
  Memory kv_[kKvFormatCount];
  int block_counts_[kKvFormatCount] = {};
  int hot_format_ = kKvBf16;
  Memory rotations_;  // [context][half] cosines, then as many sines
  int rotated_ = 0;   // positions filled in

  // The step under way.
  std::span<const Op> ops_;
  const StepInputs* inputs_ = nullptr;
  std::span<const WantedRow> wanted_;
  std::span<const PooledRows> pooled_;
  const RowSink* sink_ = nullptr;
  float* states_ = nullptr;
  float* logits_ = nullptr;
  std::vector<uint8_t*> token_blocks_;  // [T]
  std::vector<int32_t> logit_rows_;     // per wanted row of the present chunk
  std::vector<Run> runs_;
  std::vector<Best> bests_;
};

}  // namespace quire
