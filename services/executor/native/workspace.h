// Everything a step writes that is not keys and values: activations, attention scratch, logits.
#pragma once

#include <vector>

#include "kernels/head/cpu.h"
#include "kernels/rms_norm/cpu.h"
#include "services/executor/native/memory.h"
#include "services/executor/native/program.h"

namespace quire {

constexpr int kTokenTile = 48;  // tokens whose sums of one panel stay in the first-level cache
constexpr int kHeadRows = 64;   // rows whose logits exist at a time
constexpr int kUnitRows = 12;   // query rows that share a pass over keys and values

constexpr int kLanesAtMost = 16;

// From one group of an activation to the next, in tokens: whole vectors, and not a power of two.
inline int padded_stride(int tokens) {
  return (tokens + kLanesAtMost - 1) / kLanesAtMost * kLanesAtMost + kLanesAtMost;
}

// Gives an activation of [tokens, k] its memory, for strides up to padded_stride(tokens).
void lay_out(Carver& carver, Activation& activation, int k, int tokens);

// Memory of one thread.
struct ThreadSpace {
  float* sums = nullptr;         // [2][kTokenTile][32]
  float* inverse_rms = nullptr;  // [tokens]
  float* scratch = nullptr;      // of attention
  Best best;                     // [kHeadRows]
};

class Workspace {
 public:
  // Steps of a program; `ordered_k` is the most columns that one of its operations takes in an order of their own.
  Workspace(const Shape& shape, int ordered_k, int threads);
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // Makes room for steps of `tokens` tokens and sets strides for this one. Allocates only where it grows.
  void reserve(int tokens);
  // The same for the states of attention splits.
  float* reserve_states(size_t floats);
  // [kHeadRows][padded vocabulary]; made at first use.
  float* logits();

  Residual stream;
  Activation normed, attended, inner;
  Activation ordered;        // any of those in the order of the present operation's columns
  float* queries = nullptr;  // [tokens][heads][half][2]
  std::vector<ThreadSpace> threads;
  size_t logit_stride = 0;

 private:
  void lay_out(Carver& carver, int tokens);

  const Shape& shape_;
  int ordered_k_ = 0, capacity_ = 0;
  size_t states_capacity_ = 0;
  Memory memory_, states_, logits_;
};

}  // namespace quire
