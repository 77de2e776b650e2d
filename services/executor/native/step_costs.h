// What drafts must give to pay for themselves: a step with more tokens takes longer.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

namespace quire {

// How many times as long a step takes with drafts as without: as it was when a model was loaded, and corrected since.
//
// What was measured at loading gives the shape: straight lines between figures, and beyond them. How steep it is, is
// learned for batches of about the same size. Steps that follow each other are compared, for the machine was the same
// for both, and the median of such comparisons counts: single steps are often disturbed.
class StepCosts {
 public:
  // Pairs of tokens and seconds, ascending by tokens. Throws std::invalid_argument where there are not at least two,
  // or one takes no time or has no tokens.
  // Other work on the machine only adds to them: no step takes longer than one with more tokens.
  explicit StepCosts(std::span<const std::pair<int, double>> measured);

  // Of a step of `tokens`, `plain` of them not drafts.
  double ratio(int plain, int tokens) const;
  // Takes in what the next step of decodes took; what no step can have taken says nothing.
  void observe(int plain, int tokens, double seconds);

 private:
  struct Comparison {
    double slope, weight;
  };
  // Of batches of about the same size.
  struct Slope {
    std::vector<Comparison> compared;  // the latest ones
    size_t next = 0;                   // to be replaced once there are enough
    double median = 1.0;
  };
  struct Step {
    int plain = 0, tokens = 0;
    double seconds = 0.0;
  };

  double measured(int tokens) const;
  double rise(int plain, int tokens) const;  // of what was measured, as a part of the plain step
  static size_t size_class(int plain);
  static void learn(Slope& slope, Comparison comparison);

  std::vector<int> tokens_;
  std::vector<double> seconds_;
  std::array<Slope, 32> slopes_;  // by size class
  Step before_;
};

// What a step must be to have drafts.
struct DraftTerms {
  double margin;      // drafts must promise so much more than none: the best of many estimates is flattered
  double least_pace;  // of its speed without drafts, what each sequence keeps
};

// How many drafts of each sequence to verify, so that the step gives the most tokens a second: none where that is not
// more than without by the margin, and never so many that a sequence becomes slower than it may.
//
// `chances[i][j]` is the probability that the first j + 1 drafts of sequence i are accepted; `tokens` the step has
// without drafts.
std::vector<int> best_lengths(const std::vector<std::vector<double>>& chances, int tokens, const StepCosts& costs,
                              const DraftTerms& terms);

}  // namespace quire
