#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "services/executor/native/bindings.h"
#include "services/executor/native/instruction_set.h"
#include "services/executor/native/sampler.h"

namespace nb = nanobind;

namespace quire {
namespace {

using Ids = std::vector<int64_t>;
using Bits = HostArray<const uint32_t, nb::ndim<1>>;

// Scratch of its own: these functions are for tests and single rows.
struct OwnScratch {
  explicit OwnScratch(int vocab)
      : floats(sampler_scratch_floats(vocab)), parts(sampler_scratch(floats.data(), vocab)) {}

  std::vector<float> floats;
  SamplerScratch parts;
};

void make_sampler(Sampler* self, double temperature, int64_t top_k, double top_p, double min_p,
                  double repetition_penalty, double presence_penalty, double frequency_penalty,
                  const std::map<int64_t, double>& logit_bias, nb::int_ seed, uint32_t choice, int64_t min_tokens,
                  const Ids& banned_until_min_tokens, int logprob_count, const Ids& prompt_ids, int vocab_size) {
  if (vocab_size < 1) throw std::invalid_argument("vocab_size must be at least 1");
  SamplingRule rule;
  rule.temperature = temperature;
  rule.top_k = top_k;
  rule.top_p = top_p;
  rule.min_p = min_p;
  rule.repetition_penalty = repetition_penalty;
  rule.presence_penalty = presence_penalty;
  rule.frequency_penalty = frequency_penalty;
  rule.seed = nb::cast<uint64_t>(seed & nb::int_(~uint64_t(0)));
  rule.choice = choice;
  rule.min_tokens = min_tokens;
  new (self) Sampler(rule, vocab_size, logit_bias, banned_until_min_tokens, prompt_ids, logprob_count);
}

int32_t sample_row(const Sampler& sampler, Floats logits, uint32_t output_position, const std::string& instruction_set,
                   std::optional<Bits> allowed) {
  const int vocab = sampler.vocab_size();
  if (int(logits.size()) != vocab) throw std::invalid_argument("logits must have the length of the vocabulary");
  if (allowed && allowed->size() != (size_t(vocab) + 31) / 32) {
    throw std::invalid_argument("allowed must have a bit per token");
  }
  const KernelTable& kernels = kernels_for(instruction_set);
  const OwnScratch scratch(vocab);
  nb::gil_scoped_release release;
  return kernels.draw(logits.data(), vocab, sampler.rule(), sampler.history(), output_position,
                      allowed ? allowed->data() : nullptr, scratch.parts);
}

std::tuple<float, int, std::vector<int32_t>, std::vector<float>> score_row(Floats logits, int target, int count,
                                                                           const std::string& instruction_set) {
  const int vocab = int(logits.size());
  if (target < 0 || target >= vocab) throw std::invalid_argument("target is not in the vocabulary");
  if (count < 0) throw std::invalid_argument("count must be at least 0");
  const KernelTable& kernels = kernels_for(instruction_set);
  const OwnScratch scratch(vocab);
  std::vector<int32_t> ids(size_t(std::min(count, vocab)));
  std::vector<float> logprobs(ids.size());
  const TokenScore found =
      kernels.score(logits.data(), vocab, target, count, ids.data(), logprobs.data(), scratch.parts);
  return {found.logprob, found.rank, ids, logprobs};
}

std::vector<uint32_t> noise_words(const Sampler& sampler, uint32_t output_position,
                                  const std::string& instruction_set) {
  std::vector<uint32_t> words(size_t(sampler.vocab_size()));
  kernels_for(instruction_set).noise_words(sampler.rule(), output_position, sampler.vocab_size(), words.data());
  return words;
}

}  // namespace

void bind_sampler(nb::module_& module) {
  nb::class_<Sampler>(module, "Sampler", "How one sequence samples, and what the penalties must know of its tokens.")
      .def("__init__", &make_sampler, nb::kw_only(), nb::arg("temperature"), nb::arg("top_k"), nb::arg("top_p"),
           nb::arg("min_p"), nb::arg("repetition_penalty"), nb::arg("presence_penalty"), nb::arg("frequency_penalty"),
           nb::arg("logit_bias"), nb::arg("seed"), nb::arg("choice"), nb::arg("min_tokens"),
           nb::arg("banned_until_min_tokens"), nb::arg("logprob_count"), nb::arg("prompt_ids"), nb::arg("vocab_size"),
           "Of a SamplingRule. `prompt_ids` matter where needs_history is true. ValueError names an id that is not in "
           "the vocabulary.")
      .def(
          "observe", [](Sampler& self, const Ids& ids) { self.observe(ids); }, nb::arg("ids"),
          "Appends output tokens; ValueError, and none of them, where one is not in the vocabulary.")
      .def(
          "takes_argmax",
          [](const Sampler& self, uint32_t output_position) { return takes_argmax(self.rule(), output_position); },
          nb::arg("output_position"), "Whether this output token is simply the argmax of the logits.")
      .def_prop_ro("observed", &Sampler::observed, "Output tokens so far.")
      .def_prop_ro("needs_history", &Sampler::needs_history, "Whether a draw depends on earlier tokens.")
      .def_prop_ro("logprob_count", &Sampler::logprob_count, "Alternatives to report per token; -1 for no scores.");
  module.def(
      "sample_row", &sample_row, nb::arg("sampler"), nb::arg("logits").noconvert(), nb::arg("output_position"),
      nb::arg("instruction_set"), nb::arg("allowed").noconvert() = nb::none(),
      "The token drawn from logits [V] fp32, among those with a bit in `allowed` [ceil(V / 32)] uint32; -1 where "
      "a logit is NaN or +inf or nothing above -inf is left.");
  module.def("score_row", &score_row, nb::arg("logits").noconvert(), nb::arg("target"), nb::arg("count"),
             nb::arg("instruction_set"),
             "Log probability and rank of `target` under logits [V] fp32, ids and log probabilities of the `count` "
             "likeliest tokens.");
  module.def("noise_words", &noise_words, nb::arg("sampler"), nb::arg("output_position"), nb::arg("instruction_set"),
             "The random words [V] of this output token.");
}

}  // namespace quire
