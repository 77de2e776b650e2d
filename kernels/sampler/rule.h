// How a sequence samples and what it has said so far, as the kernels read it, and the memory that they work in.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

struct SamplingRule {
  double temperature = 1.0;
  double top_p = 1.0;
  double min_p = 0.0;
  double repetition_penalty = 1.0;
  double presence_penalty = 0.0;
  double frequency_penalty = 0.0;
  int64_t top_k = 0;  // 0 and below keep all
  uint64_t seed = 0;
  uint32_t choice = 0;
  int64_t min_tokens = 0;
  const int32_t* banned = nullptr;  // until min_tokens
  int banned_count = 0;
  const int32_t* bias_ids = nullptr;  // each once
  const float* bias = nullptr;
  int bias_count = 0;
};

// Distinct tokens of prompt and outputs, and output that is not counted among them yet.
struct History {
  const int32_t* ids = nullptr;
  int size = 0;
  const int32_t* seen = nullptr;  // [vocabulary] 1 + times among the outputs; 0 for a token that is not in ids
  const int32_t* drafts = nullptr;
  int draft_count = 0;
};

// Of one row; its ids find room among the scratch of any vocabulary.
constexpr int kMostDrafts = 64;

static inline bool is_greedy(const SamplingRule& rule) {
  return rule.temperature < 1e-5 || rule.top_k == 1 || rule.top_p == 0.0;
}

static inline bool penalizes(const SamplingRule& rule) {
  return rule.repetition_penalty != 1.0 || rule.presence_penalty != 0.0 || rule.frequency_penalty != 0.0;
}

static inline bool bans(const SamplingRule& rule, uint32_t output_position) {
  return output_position < rule.min_tokens && rule.banned_count > 0;
}

// Whether the logits change before temperature and truncation.
static inline bool changes_logits(const SamplingRule& rule, uint32_t output_position) {
  return rule.bias_count > 0 || penalizes(rule) || bans(rule, output_position);
}

// Whether the token is simply the argmax of the model's logits.
static inline bool takes_argmax(const SamplingRule& rule, uint32_t output_position) {
  return is_greedy(rule) && !changes_logits(rule, output_position);
}

// The log probability of one token under one row of logits, and how many tokens are likelier, plus one.
struct TokenScore {
  float logprob;
  int rank;
};

// Floats that draw and score work in; one for each thread.
struct SamplerScratch {
  float* values;  // [padded vocabulary], as the next two
  float* picked;
  float* weights;
  float* peaks;  // [padded vocabulary / 32]
};

static inline size_t padded_vocab(int vocab) { return (size_t(vocab) + 63) / 64 * 64; }

static inline size_t sampler_scratch_floats(int vocab) { return padded_vocab(vocab) * 3 + padded_vocab(vocab) / 32; }

static inline SamplerScratch sampler_scratch(float* floats, int vocab) {
  const size_t padded = padded_vocab(vocab);
  return {floats, floats + padded, floats + 2 * padded, floats + 3 * padded};
}

}  // namespace quire
