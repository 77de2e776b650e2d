// Softmax of one query row within a split.
#pragma once

#include "kernels/simd/simd.h"

namespace quire::QUIRE_ISA {

constexpr float kLowest = -3.0e38f;

// Scores to probabilities 2^(score - maximum), zero from `count` to `end`; returns their sum.
QUIRE_INLINE float softmax_row(float* scores, [[maybe_unused]] uint16_t* narrow, int count, int end, float* maximum) {
  F most = splat(kLowest);
  for (int i = 0; i < count; i += kLanes) {
    most = max(select(first_lanes(count - i), load(scores + i), splat(kLowest)), most);
  }
  *maximum = reduce_max(most);
  const F top = splat(*maximum);
  F sum = zero();
  for (int i = 0; i < end; i += kLanes) {
    const F p = select(first_lanes(count - i), exp2(sub(load(scores + i), top)), zero());
    sum = add(sum, p);
    store(scores + i, p);
  }
  if constexpr (kBf16Products) {
    for (int i = 0; i < end; i++) narrow[i] = to_bf16(scores[i]);
  }
  return reduce_add(sum);
}

}  // namespace quire::QUIRE_ISA
