// Draws and scores tokens. The rules are those of services/executor/sampling/draw.py, the random numbers those of
// philox.py, the scores those of scores.py.
#pragma once

#include "kernels/sampler/rule.h"

namespace quire::QUIRE_ISA {

// The token drawn from logits [vocab] as output token number `output_position`. `allowed` holds a bit per token, the
// first in the lowest bit; null allows all. -1 where a logit is NaN or +inf, or nothing above -inf is left.
int32_t draw(const float* logits, int vocab, const SamplingRule& rule, const History& history, uint32_t output_position,
             const uint32_t* allowed, const SamplerScratch& scratch);

// Scores `target` under logits [vocab]; min(count, vocab) likeliest tokens go to top_ids and top_logprobs, equal ones
// by ascending id. NaN, rank 1 and the first ids where a logit is NaN or +inf or all are -inf.
TokenScore score(const float* logits, int vocab, int target, int count, int32_t* top_ids, float* top_logprobs,
                 const SamplerScratch& scratch);

// The random words [vocab] that draw gives the tokens.
void noise_words(const SamplingRule& rule, uint32_t output_position, int vocab, uint32_t* words);

}  // namespace quire::QUIRE_ISA
