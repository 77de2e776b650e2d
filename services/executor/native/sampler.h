// One sequence's sampling: its rule, and what the penalties must know of its tokens.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "kernels/sampler/rule.h"

namespace quire {

// Must not observe while a step draws with it.
class Sampler {
 public:
  // `rule` without its arrays, which follow. Throws std::invalid_argument naming the token id that is not in the
  // vocabulary.
  Sampler(const SamplingRule& rule, int vocab_size, const std::map<int64_t, double>& logit_bias,
          std::span<const int64_t> banned, std::span<const int64_t> prompt_ids, int logprob_count);
  Sampler(const Sampler&) = delete;  // rule_ points into it

  // Appends output tokens. Throws std::invalid_argument, as above, before anything is appended.
  void observe(std::span<const int64_t> ids);

  const SamplingRule& rule() const { return rule_; }
  History history() const { return {seen_ids_.data(), int(seen_ids_.size()), seen_.data()}; }
  bool needs_history() const { return penalizes(rule_); }
  int vocab_size() const { return vocab_size_; }
  int logprob_count() const { return logprob_count_; }  // -1 for none
  int64_t observed() const { return observed_; }        // output tokens

 private:
  void check(std::span<const int64_t> ids, const char* what) const;
  void see(std::span<const int64_t> ids, int32_t times);

  SamplingRule rule_;
  int vocab_size_, logprob_count_;
  int64_t observed_ = 0;
  std::vector<int32_t> banned_, bias_ids_;
  std::vector<float> bias_;
  std::vector<int32_t> seen_ids_, seen_;  // as in History; empty where no penalty needs them
};

}  // namespace quire
