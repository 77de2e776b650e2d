#include "services/executor/native/step_costs.h"

#include <algorithm>
#include <cmath>

#include "services/executor/native/refuse.h"

namespace quire {
namespace {

// Tokens of larger batches, whose steps are known only once they were computed.
constexpr int kFurther[] = {32, 64, 128, 256};
// Part of an error that is taken over where a figure was corrected often, and the most that one error counts (a
// logarithm): other work on the machine makes single steps much longer.
constexpr double kLeastGain = 0.05, kMostError = 0.5;

struct Offer {
  double chance;
  size_t sequence;
};

}  // namespace

StepCosts::StepCosts(std::span<const std::pair<int, double>> measured) {
  if (measured.size() < 2) refuse("costs of steps are measured for two numbers of tokens at least");
  for (const auto& [tokens, seconds] : measured) {
    if (!tokens_.empty() && tokens <= tokens_.back()) refuse("costs of steps are measured by ascending tokens");
    tokens_.push_back(tokens);
    seconds_.push_back(seconds);
  }
  for (size_t at = seconds_.size() - 1; at-- > 0;) seconds_[at] = std::min(seconds_[at], seconds_[at + 1]);
  for (const int tokens : kFurther) {
    if (tokens <= tokens_.back()) continue;
    seconds_.push_back(seconds(tokens));
    tokens_.push_back(tokens);
  }
  corrected_.assign(tokens_.size(), 0.0);
}

double StepCosts::seconds(int tokens) const {
  const size_t at = above(tokens);
  const double slope = (seconds_[at] - seconds_[at - 1]) / (tokens_[at] - tokens_[at - 1]);
  // Corrected figures may fall; going on like that would come to nothing.
  if (tokens > tokens_[at]) return seconds_[at] + std::max(slope, 0.0) * (tokens - tokens_[at]);
  return seconds_[at - 1] + slope * (tokens - tokens_[at - 1]);
}

void StepCosts::observe(int tokens, double seconds) {
  const int other = before_tokens_;
  const double other_seconds = before_seconds_;
  before_tokens_ = tokens;
  before_seconds_ = seconds;
  if (!other || other == tokens || !(seconds > 0.0 && other_seconds > 0.0)) return;
  const bool grew = tokens > other;
  const int fewer = grew ? other : tokens, more = grew ? tokens : other;
  const double measured = grew ? seconds / other_seconds : other_seconds / seconds;
  const double error = std::log(measured) - std::log(this->seconds(more) / this->seconds(fewer));
  correct(fewer, more, std::clamp(error, -kMostError, kMostError));
}

// Moves the figures beside `more`, as far as they are not those of `fewer`; unseen ones above move along.
void StepCosts::correct(int fewer, int more, double error) {
  const size_t at = above(more);
  const double part = std::clamp(double(more - tokens_[at - 1]) / double(tokens_[at] - tokens_[at - 1]), 0.0, 1.0);
  double factor = 1.0;
  for (const auto& [knot, weight] : {std::pair(at - 1, 1.0 - part), std::pair(at, part)}) {
    if (weight <= 0.0 || tokens_[knot] <= fewer) continue;
    const double gain = std::max(kLeastGain, 1.0 / (2.0 + corrected_[knot]));
    factor = std::exp(gain * weight * error);
    seconds_[knot] *= factor;
    corrected_[knot] += weight;
  }
  for (size_t knot = at + 1; knot < tokens_.size(); knot++) {
    if (corrected_[knot] == 0.0) seconds_[knot] *= factor;
  }
}

size_t StepCosts::above(int tokens) const {
  const size_t at = std::lower_bound(tokens_.begin(), tokens_.end(), tokens) - tokens_.begin();
  return std::min(std::max(at, size_t(1)), tokens_.size() - 1);
}

std::vector<int> best_lengths(const std::vector<std::vector<double>>& chances, int tokens, const StepCosts& costs,
                              const DraftTerms& terms) {
  std::vector<Offer> offers;
  for (size_t sequence = 0; sequence < chances.size(); sequence++) {
    for (const double chance : chances[sequence]) offers.push_back({chance, sequence});
  }
  // Chances of a sequence fall with every draft, so the likeliest of all never skip one.
  std::stable_sort(offers.begin(), offers.end(), [](const Offer& a, const Offer& b) { return a.chance > b.chance; });
  const double plain = costs.seconds(tokens);
  std::vector<double> gains(chances.size(), 1.0);  // tokens that are expected of each
  double expected = tokens, best_rate = expected / plain * (1.0 + terms.margin);
  size_t best_count = 0;
  for (size_t count = 1; count <= offers.size(); count++) {
    const auto& [chance, sequence] = offers[count - 1];
    expected += chance;
    gains[sequence] += chance;
    const double seconds = costs.seconds(tokens + int(count));
    if (expected <= best_rate * seconds) continue;
    if (terms.least_pace * seconds > plain) {
      const bool all_may = gains.size() == size_t(tokens);  // else there is one that has no drafts
      const double slowest = all_may ? *std::min_element(gains.begin(), gains.end()) : 1.0;
      if (slowest * plain < terms.least_pace * seconds) continue;
    }
    best_rate = expected / seconds;
    best_count = count;
  }
  std::vector<int> lengths(chances.size(), 0);
  for (size_t at = 0; at < best_count; at++) lengths[offers[at].sequence]++;
  return lengths;
}

}  // namespace quire
