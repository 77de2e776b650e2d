#include "services/executor/native/step_binding.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace nb = nanobind;

namespace quire {
namespace {

template <class T>
T taken_from(nb::handle object, const char* what, bool convert = true) {
  T value{};
  if (!nb::try_cast(object, value, convert)) throw nb::type_error(what);
  return value;
}

}  // namespace

StepInputs make_inputs(const Int32s& token_ids, const Int32s& positions, const Int32s& query_starts,
                       const Int32s& context_lengths, const Int32Table& block_tables,
                       const std::optional<ByteTable>& block_formats) {
  StepInputs inputs;
  inputs.token_ids = {token_ids.data(), token_ids.size()};
  inputs.positions = {positions.data(), positions.size()};
  inputs.query_starts = {query_starts.data(), query_starts.size()};
  inputs.context_lengths = {context_lengths.data(), context_lengths.size()};
  inputs.block_tables = {block_tables.data(), block_tables.size()};
  inputs.table_width = int(block_tables.shape(1));
  if (block_formats) {
    if (block_formats->shape(0) != block_tables.shape(0) || block_formats->shape(1) != block_tables.shape(1)) {
      throw std::invalid_argument("block_formats and block_tables differ in shape");
    }
    inputs.block_formats = block_formats->data();
  }
  return inputs;
}

BoundModel::BoundModel(const ProgramBuilder& program, Bytes weights, std::shared_ptr<ThreadPool> pool,
                       const KernelTable& kernels)
    : weights_(weights), model_(program.bind(weights.data(), weights.size()), std::move(pool), kernels) {
  const size_t bytes = sampler_scratch_floats(model_.shape().vocab_size) * sizeof(float);
  for (int i = 0; i < model_.threads(); i++) scratch_.emplace_back(bytes);
}

int BoundModel::want_scores(int count) {
  Scores scores;
  scores.first = top_ids_.size();
  scores.count = std::min(count, model_.shape().vocab_size);
  top_ids_.resize(scores.first + size_t(scores.count));
  top_logprobs_.resize(top_ids_.size());
  scores_.push_back(scores);
  return int(scores_.size()) - 1;
}

void BoundModel::collect_samples(const Int32s& rows, const nb::list& samplers, const Int32s& output_positions,
                                 const Drafts& drafts, const Masks& masks) {
  masks_filled_ = masks.filled;
  if (masks.bits) {
    if (!masks.first_rows || masks.first_rows->size() != rows.size() || !masks.filled) {
      throw std::invalid_argument("masks go with mask_rows of the length of rows and with masks_filled");
    }
    if (masks.bits->shape(1) != (size_t(model_.shape().vocab_size) + 31) / 32) {
      throw std::invalid_argument("masks must have a bit per token");
    }
  }
  if (samplers.size() != rows.size() || output_positions.size() != rows.size()) {
    throw std::invalid_argument("rows, samplers and output_positions differ in length");
  }
  std::span<const int32_t> left;  // drafts of later rows
  if (drafts.ids) {
    if (!drafts.counts || !drafts.first_places || drafts.counts->size() != rows.size() ||
        drafts.first_places->size() != rows.size()) {
      throw std::invalid_argument("rows, draft_counts and first_places differ in length");
    }
    left = {drafts.ids->data(), drafts.ids->size()};
    for (const int32_t id : left) {
      if (id < 0 || id >= model_.shape().vocab_size) throw std::invalid_argument("a draft is not in the vocabulary");
    }
  }
  for (size_t i = 0; i < rows.size(); i++) {
    Task task;
    if (output_positions.data()[i] < 0) throw std::invalid_argument("an output position is negative");
    if (rows.data()[i] > INT32_MAX - kMostDrafts) throw std::invalid_argument("a row is not one of the step's tokens");
    const nb::handle sampler = samplers[i];
    if (!sampler.is_none()) {
      task.sampler = taken_from<const Sampler*>(sampler, "samplers must hold Sampler or None");
      if (task.sampler->vocab_size() != model_.shape().vocab_size) {
        throw std::invalid_argument("a sampler was made for another vocabulary");
      }
    }
    const int count = drafts.ids ? drafts.counts->data()[i] : 0;
    const int first = drafts.ids ? drafts.first_places->data()[i] : 0;
    if (first < 0 || first > count || count > kMostDrafts || size_t(count) > left.size()) {
      throw std::invalid_argument("draft_counts and first_places do not fit the drafts");
    }
    const int first_mask = masks.bits ? masks.first_rows->data()[i] : -1;
    if (first_mask >= 0) {
      if (!task.sampler) throw std::invalid_argument("a masked row needs a sampler");
      if (size_t(first_mask) + size_t(count - first) >= masks.bits->shape(0)) {
        throw std::invalid_argument("mask_rows do not fit the masks");
      }
    }
    for (int place = first; place <= count; place++) {
      if (first_mask >= 0) {
        task.allowed = masks.bits->data() + (size_t(first_mask) + size_t(place - first)) * masks.bits->shape(1);
      }
      task.output_position = uint32_t(output_positions.data()[i]) + uint32_t(place);
      task.drafts = left.first(size_t(place));
      if (task.sampler && task.sampler->logprob_count() >= 0) task.scores = want_scores(task.sampler->logprob_count());
      wanted_.push_back({rows.data()[i] + place - first, task.sampler != nullptr});
      tasks_.push_back(task);
    }
    left = left.subspan(size_t(count));
  }
  if (!left.empty()) throw std::invalid_argument("draft_counts and first_places do not fit the drafts");
}

void BoundModel::collect_scored(const nb::list& scored, int tokens) {
  for (nb::handle item : scored) {
    const char* kind = "scored must hold tuples (first row, targets int32 [n], count)";
    if (!nb::isinstance<nb::tuple>(item) || nb::len(item) != 3) throw nb::type_error(kind);
    const auto part = nb::borrow<nb::tuple>(item);
    const int first = taken_from<int>(part[0], kind), count = taken_from<int>(part[2], kind);
    const auto targets = taken_from<Int32s>(part[1], kind, false);
    if (first < 0 || size_t(first) + targets.size() > size_t(tokens)) {
      throw std::invalid_argument("a scored row is not one of the step's tokens");
    }
    if (count < 0) throw std::invalid_argument("a count of alternatives is negative");
    scored_counts_.push_back(targets.size());
    for (size_t i = 0; i < targets.size(); i++) {
      Task task;
      task.target = targets.data()[i];
      if (task.target < 0 || task.target >= model_.shape().vocab_size) {
        throw std::invalid_argument("target " + std::to_string(task.target) + " is not in the vocabulary");
      }
      task.scores = want_scores(count);
      wanted_.push_back({first + int(i), true});
      tasks_.push_back(task);
    }
  }
}

void BoundModel::collect_pooled(const nb::list& pooled) {
  for (nb::handle item : pooled) {
    const char* kind = "pooled must hold tuples (first row, count, total float64 [hidden size])";
    if (!nb::isinstance<nb::tuple>(item) || nb::len(item) != 3) throw nb::type_error(kind);
    const auto part = nb::borrow<nb::tuple>(item);
    const auto total = taken_from<Doubles>(part[2], kind, false);  // the list keeps it alive
    if (total.size() != size_t(model_.shape().hidden_size)) {
      throw std::invalid_argument("a pooled total must be of the hidden size");
    }
    pooled_.push_back({taken_from<int>(part[0], kind), taken_from<int>(part[1], kind), total.data()});
  }
}

void BoundModel::finish(Task& task, const float* logits, int32_t argmax, int thread) {
  const int vocab = model_.shape().vocab_size;
  const SamplerScratch scratch = sampler_scratch(reinterpret_cast<float*>(scratch_[size_t(thread)].data()), vocab);
  if (task.sampler) {
    History history = task.sampler->history();
    history.drafts = task.drafts.data();
    history.draft_count = int(task.drafts.size());
    if (task.allowed) masks_filled_->wait();
    task.token = model_.kernels().draw(logits, vocab, task.sampler->rule(), history, task.output_position, task.allowed,
                                       scratch);
  } else {
    task.token = task.target >= 0 ? task.target : argmax;
  }
  if (task.scores >= 0 && task.token >= 0) {
    Scores& found = scores_[size_t(task.scores)];
    found.score = model_.kernels().score(logits, vocab, task.token, found.count, top_ids_.data() + found.first,
                                         top_logprobs_.data() + found.first, scratch);
  }
}

// Scores `first` .. + count as (chosen, ranks, top ids, top log probabilities).
nb::object BoundModel::to_python(size_t first, size_t count) const {
  nb::list chosen, ranks, ids, logprobs;
  for (size_t i = first; i < first + count; i++) {
    const Scores& found = scores_[i];
    nb::list row_ids, row_logprobs;
    for (int j = 0; j < found.count; j++) {
      row_ids.append(top_ids_[found.first + size_t(j)]);
      row_logprobs.append(top_logprobs_[found.first + size_t(j)]);
    }
    chosen.append(found.score.logprob);
    ranks.append(found.score.rank);
    ids.append(row_ids);
    logprobs.append(row_logprobs);
  }
  return nb::make_tuple(chosen, ranks, ids, logprobs);
}

nb::tuple BoundModel::step(const StepInputs& inputs, const Int32s& rows, const nb::list& samplers,
                           const Int32s& output_positions, const nb::list& scored, const Drafts& drafts,
                           const Masks& masks, int layers, const nb::list& pooled) {
  wanted_.clear();
  tasks_.clear();
  pooled_.clear();
  scored_counts_.clear();
  scores_.clear();
  top_ids_.clear();
  top_logprobs_.clear();
  collect_samples(rows, samplers, output_positions, drafts, masks);
  const size_t sampled = tasks_.size();
  collect_scored(scored, inputs.tokens());
  collect_pooled(pooled);
  {
    nb::gil_scoped_release release;
    model_.step(
        inputs, wanted_,
        [this](int row, float* logits, int32_t argmax, int thread) {
          finish(tasks_[size_t(row)], logits, argmax, thread);
        },
        layers, pooled_);
  }
  auto [tokens, owner] = new_array<int32_t>(sampled);
  nb::list row_scores, prompt_scores;
  for (size_t i = 0; i < sampled; i++) {
    tokens[i] = tasks_[i].token;
    const bool has_scores = tasks_[i].scores >= 0 && tasks_[i].token >= 0;
    row_scores.append(has_scores ? to_python(size_t(tasks_[i].scores), 1) : nb::none());
  }
  size_t next = sampled;
  for (size_t count : scored_counts_) {
    prompt_scores.append(to_python(count ? size_t(tasks_[next].scores) : 0, count));
    next += count;
  }
  return nb::make_tuple(nb::ndarray<nb::numpy, int32_t, nb::ndim<1>>(tokens, {sampled}, owner), row_scores,
                        prompt_scores);
}

}  // namespace quire
