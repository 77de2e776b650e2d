// The highest of a row's values without sorting the vocabulary.
#pragma once

#include "kernels/sampler/rule.h"
#include "kernels/simd/simd.h"

namespace quire::QUIRE_ISA {

constexpr int kGroup = 4 * kLanes;  // values that share a peak

// Values [vocab] of at most 0, padded to whole groups with -inf.
struct Row {
  float* values;
  float* peaks;  // per group its highest value
  int vocab;
  int groups;
};

// The depth of a value below 0, as bits: it sorts as an unsigned integer does.
QUIRE_INLINE uint32_t depth_of(float value) {
  const float depth = 0.0f - value;
  uint32_t bits;
  memcpy(&bits, &depth, 4);
  return bits;
}

// Of `count` values, 1 or more, the highest at which the weights of what is no lower sum to `target`; the lowest, where
// all do not. Leaves values and weights in disorder.
static float select_by_weight(float* values, float* weights, int count, double target) {
  for (;;) {
    uint32_t least = depth_of(values[0]), most = least;
    for (int i = 1; i < count; i++) {
      const uint32_t depth = depth_of(values[i]);
      least = depth < least ? depth : least;
      most = depth > most ? depth : most;
    }
    if (least == most) return values[0];
    // 256 buckets over just this range.
    const int bits = 32 - __builtin_clz(most - least), shift = bits > 8 ? bits - 8 : 0;
    double sums[256] = {};
    for (int i = 0; i < count; i++) sums[(depth_of(values[i]) - least) >> shift] += double(weights[i]);
    const int last = int((most - least) >> shift);
    int bucket = 0;
    for (; bucket < last && sums[bucket] < target; bucket++) target -= sums[bucket];
    int kept = 0;
    for (int i = 0; i < count; i++) {
      values[kept] = values[i];
      weights[kept] = weights[i];
      kept += int((depth_of(values[i]) - least) >> shift) == bucket;
    }
    count = kept;
  }
}

// Copies the values of [from, below) to scratch.picked; returns how many there are.
static int pick(const Row& row, float from, float below, const SamplerScratch& scratch) {
  int count = 0;
  for (int group = 0; group < row.groups; group++) {
    if (row.peaks[group] < from) continue;
    for (int first = group * kGroup; first < (group + 1) * kGroup; first += kLanes) {
      if (!any(either(greater(load(row.values + first), splat(from)), equal(load(row.values + first), splat(from))))) {
        continue;
      }
      const int end = first + kLanes < row.vocab ? first + kLanes : row.vocab;
      for (int i = first; i < end; i++) {
        scratch.picked[count] = row.values[i];
        count += int(row.values[i] >= from) & int(row.values[i] < below);
      }
    }
  }
  return count;
}

// The highest but rank - 1, 1 <= rank <= count, of the `count` picked values.
static float select_rank(int rank, int count, const SamplerScratch& scratch) {
  for (int i = 0; i < count; i++) scratch.weights[i] = 1.0f;
  return select_by_weight(scratch.picked, scratch.weights, count, double(rank));
}

// The same of all values, 1 <= rank <= vocab.
static float value_of_rank(const Row& row, int rank, const SamplerScratch& scratch) {
  float bound = -__builtin_inff();
  if (rank <= row.groups) {  // as many groups have a value that is no lower than the peak of that rank
    memcpy(scratch.picked, row.peaks, size_t(row.groups) * sizeof(float));
    bound = select_rank(rank, row.groups, scratch);
  }
  return select_rank(rank, pick(row, bound, __builtin_inff(), scratch), scratch);
}

}  // namespace quire::QUIRE_ISA
