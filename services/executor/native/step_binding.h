// A step as Python asks for it: what each row is to become, and the results as Python objects.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "services/executor/native/bindings.h"
#include "services/executor/native/gate.h"
#include "services/executor/native/memory.h"
#include "services/executor/native/model.h"
#include "services/executor/native/program_binding.h"
#include "services/executor/native/sampler.h"

namespace quire {

using ByteTable = HostArray<const uint8_t, nanobind::ndim<2>>;

// Throws std::invalid_argument where block_formats is not of the shape of block_tables.
StepInputs make_inputs(const Int32s& token_ids, const Int32s& positions, const Int32s& query_starts,
                       const Int32s& context_lengths, const Int32Table& block_tables,
                       const std::optional<ByteTable>& block_formats);

// Output tokens of sampled rows that their samplers have not observed, one row's after the other. Absent: there are
// none.
struct Drafts {
  std::optional<Int32s> ids;           // [D]
  std::optional<Int32s> counts;        // [R]
  std::optional<Int32s> first_places;  // [R]
};

using MaskTable = HostArray<const uint32_t, nanobind::ndim<2>>;

// Which tokens may be drawn. Absent: all of them.
struct Masks {
  std::optional<MaskTable> bits;     // [M, (vocabulary + 31) / 32]
  std::optional<Int32s> first_rows;  // [R] of bits, of each sampled row's first token; -1 allows all
  const Gate* filled = nullptr;      // bits are read once it is open
};

using Doubles = HostArray<double, nanobind::ndim<1>>;

// A model with the weights that it reads and what sampling needs.
class BoundModel {
 public:
  BoundModel(const ProgramBuilder& program, Bytes weights, std::shared_ptr<ThreadPool> pool,
             const KernelTable& kernels);

  Model& model() { return model_; }

  // See the docstring of Model.step.
  nanobind::tuple step(const StepInputs& inputs, const Int32s& rows, const nanobind::list& samplers,
                       const Int32s& output_positions, const nanobind::list& scored, const Drafts& drafts,
                       const Masks& masks, int layers, const nanobind::list& pooled);

 private:
  // One row's scores; alternatives lie in top_ids_ and top_logprobs_.
  struct Scores {
    TokenScore score{};
    size_t first = 0;
    int count = 0;
  };
  // What becomes of a wanted row: it is sampled, or scored under a known target.
  struct Task {
    const Sampler* sampler = nullptr;  // null: the argmax, or `target` is scored
    uint32_t output_position = 0;
    std::span<const int32_t> drafts;    // output that the sampler has not observed
    const uint32_t* allowed = nullptr;  // a bit per token; null allows all
    int32_t target = -1;
    int scores = -1;  // index into scores_, where scores are wanted
    int32_t token = -1;
  };

  void collect_samples(const Int32s& rows, const nanobind::list& samplers, const Int32s& output_positions,
                       const Drafts& drafts, const Masks& masks);
  void collect_scored(const nanobind::list& scored, int tokens);
  void collect_pooled(const nanobind::list& pooled);
  int want_scores(int count);
  void finish(Task& task, const float* logits, int32_t argmax, int thread);
  nanobind::object to_python(size_t first, size_t count) const;

  Bytes weights_;
  Model model_;
  const Gate* masks_filled_ = nullptr;  // of the step under way
  std::vector<Memory> scratch_;         // of the sampler, per thread
  std::vector<WantedRow> wanted_;
  std::vector<Task> tasks_;
  std::vector<PooledRows> pooled_;
  std::vector<Scores> scores_;
  std::vector<size_t> scored_counts_;  // targets of each scored part
  std::vector<int32_t> top_ids_;
  std::vector<float> top_logprobs_;
};

}  // namespace quire
