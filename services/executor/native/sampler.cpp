#include "services/executor/native/sampler.h"

#include <stdexcept>
#include <string>

namespace quire {

Sampler::Sampler(const SamplingRule& rule, int vocab_size, const std::map<int64_t, double>& logit_bias,
                 std::span<const int64_t> banned, std::span<const int64_t> prompt_ids, int logprob_count)
    : rule_(rule), vocab_size_(vocab_size), logprob_count_(logprob_count), banned_(banned.begin(), banned.end()) {
  check(banned, "banned_until_min_tokens");
  check(prompt_ids, "prompt_ids");
  for (const auto& [id, bias] : logit_bias) {
    check({&id, 1}, "logit_bias");
    bias_ids_.push_back(int32_t(id));
    bias_.push_back(float(bias));
  }
  rule_.banned = banned_.data();
  rule_.banned_count = int(banned_.size());
  rule_.bias_ids = bias_ids_.data();
  rule_.bias = bias_.data();
  rule_.bias_count = int(bias_.size());
  if (!needs_history()) return;
  seen_.resize(size_t(vocab_size));
  see(prompt_ids, 0);
}

void Sampler::observe(std::span<const int64_t> ids) {
  check(ids, "output");
  observed_ += int64_t(ids.size());
  if (needs_history()) see(ids, 1);
}

void Sampler::check(std::span<const int64_t> ids, const char* what) const {
  for (const int64_t id : ids) {
    if (id >= 0 && id < vocab_size_) continue;
    throw std::invalid_argument(std::string(what) + ": token id " + std::to_string(id) +
                                " is outside the vocabulary of " + std::to_string(vocab_size_));
  }
}

void Sampler::see(std::span<const int64_t> ids, int32_t times) {
  for (const int64_t id : ids) {
    int32_t& seen = seen_[size_t(id)];
    if (seen == 0) {
      seen_ids_.push_back(int32_t(id));
      seen = 1;
    }
    seen += times;
  }
}

}  // namespace quire
