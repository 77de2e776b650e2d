#include "services/executor/native/workspace.h"

#include <algorithm>

#include "kernels/paged_attention/cpu.h"

namespace quire {

void lay_out(Carver& carver, Activation& activation, int k, int tokens) {
  const size_t n = size_t(tokens), groups = size_t(k) / 32, stride = n + 2 * kLanesAtMost;
  activation.k = k;
  activation.values = carver.take<float>(n * k);
  activation.bf16 = carver.take<uint16_t>(n * k);
  activation.int8 = carver.take<int8_t>(n * k);
  activation.scale = carver.take<float>(groups * stride);
  activation.scaled_sum = carver.take<float>(groups * stride);
  activation.sum = carver.take<int32_t>(groups * stride);
  activation.int16 = carver.take<int16_t>(n * k);
  activation.int16_scale = carver.take<float>(groups * stride);
}

Workspace::Workspace(const Shape& shape, int ordered_k, int thread_count)
    : threads(size_t(thread_count)), shape_(shape), ordered_k_(ordered_k) {
  logit_stride = (size_t(shape.vocab_size) + 31) / 32 * 32;
}

void Workspace::lay_out(Carver& carver, int tokens) {
  const size_t n = size_t(tokens), hidden = size_t(shape_.padded_hidden);
  const int heads_size = shape_.heads * 2 * shape_.half;
  stream.x = carver.take<float>(n * hidden);
  stream.squares = carver.take<float>((hidden / 32) * (n + 2 * kLanesAtMost) + kLanesAtMost);
  quire::lay_out(carver, normed, int(hidden), tokens);
  quire::lay_out(carver, attended, heads_size, tokens);
  quire::lay_out(carver, inner, shape_.intermediate_size, tokens);
  quire::lay_out(carver, ordered, ordered_k_, tokens);
  queries = carver.take<float>(n * heads_size);
  const int rows = std::max(kUnitRows, shape_.heads / shape_.kv_heads);
  for (ThreadSpace& thread : threads) {
    thread.sums = carver.take<float>(2 * kTokenTile * 32);
    thread.inverse_rms = carver.take<float>(n + kLanesAtMost);
    thread.scratch = carver.take<float>(scratch_floats(rows, shape_.half));
    thread.best.values = carver.take<float>(kHeadRows * 32);
    thread.best.panels = carver.take<int32_t>(kHeadRows * 32);
  }
}

void Workspace::reserve(int tokens) {
  if (tokens > capacity_) {
    const int capacity = (tokens + 15) / 16 * 16;
    capacity_ = 0;  // nothing may be used where the allocation fails
    Carver count(nullptr);
    lay_out(count, capacity);
    memory_ = Memory(count.used());
    Carver carver(memory_.data());
    lay_out(carver, capacity);
    stream.normed = &normed;
    capacity_ = capacity;
  }
  // Compact for one token.
  const int stride = tokens == 1 ? 1 : padded_stride(tokens);
  normed.stride = attended.stride = inner.stride = ordered.stride = stride;
}

float* Workspace::reserve_states(size_t floats) {
  if (floats > states_capacity_) {
    states_ = Memory(floats * sizeof(float));
    states_capacity_ = floats;
  }
  return reinterpret_cast<float*>(states_.data());
}

float* Workspace::logits() {
  if (!logits_.data()) logits_ = Memory(kHeadRows * logit_stride * sizeof(float));
  return reinterpret_cast<float*>(logits_.data());
}

}  // namespace quire
