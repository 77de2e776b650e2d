// What drafts must give to pay for themselves: a step with more tokens takes longer.
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

namespace quire {

// Seconds of a step by its tokens: straight lines between figures, and beyond them.
//
// Only their ratios matter, and these stay where everything becomes slower, so a step is compared with the step just
// before it: what the machine did besides was the same for both.
class StepCosts {
 public:
  // Pairs of tokens and seconds, ascending by tokens. Throws std::invalid_argument where there are not at least two.
  // Other work on the machine only adds to them: no step takes longer than one with more tokens.
  explicit StepCosts(std::span<const std::pair<int, double>> measured);

  double seconds(int tokens) const;
  // Takes in what the next step of decodes took.
  void observe(int tokens, double seconds);

 private:
  void correct(int fewer, int more, double error);
  size_t above(int tokens) const;  // the figure at or above so many tokens that has one below it

  std::vector<int> tokens_;
  std::vector<double> seconds_, corrected_;  // corrected_: how often each was
  int before_tokens_ = 0;                    // of the step before; 0 for none
  double before_seconds_ = 0.0;
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
