#include <algorithm>

#include "services/executor/native/model.h"

namespace quire {

// Sums are of one column each, over tokens in order: they depend neither on threads nor on how a prompt was cut.
void Model::pool_states(const float* gains, const float* inverse_rms, int thread) {
  if (pooled_.empty()) return;
  const Shape& s = program_.shape;
  const int k = s.padded_hidden;
  pool_->for_each(thread, k / 32, [&](int group) {
    const int first = group * 32, end = std::min(first + 32, s.hidden_size);
    for (const PooledRows& part : pooled_) {
      for (int t = part.first; t < part.first + part.count; t++) {
        const float* x = space_.stream.x + size_t(t) * size_t(k);
        for (int j = first; j < end; j++) {
          const float state = x[j] * gains[j] * inverse_rms[t];
          part.total[j] += double(state);
        }
      }
    }
  });
}

}  // namespace quire
