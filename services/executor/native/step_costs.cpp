#include "services/executor/native/step_costs.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "services/executor/native/refuse.h"

namespace quire {
namespace {

// A token adds at least this part of what tokens add on average, and of the shortest step: a disturbed figure may hide
// that it adds anything.
constexpr double kLeastRise = 0.25, kLeastPart = 0.01;
constexpr double kLeastSlope = 0.02, kMostSlope = 100.0;
constexpr size_t kCompared = 32;         // comparisons that count: the latest ones
constexpr double kMeasuredWeight = 2.0;  // what was measured at loading counts as much as so many

struct Offer {
  double chance;
  size_t sequence;
};

bool is_time(double seconds) { return seconds > 0.0 && std::isfinite(seconds); }

}  // namespace

StepCosts::StepCosts(std::span<const std::pair<int, double>> measured) {
  if (measured.size() < 2) refuse("costs of steps are measured for two numbers of tokens at least");
  for (const auto& [tokens, seconds] : measured) {
    if (!tokens_.empty() && tokens <= tokens_.back()) refuse("costs of steps are measured by ascending tokens");
    if (tokens < 1 || !is_time(seconds)) refuse("costs of steps are positive seconds of at least one token");
    tokens_.push_back(tokens);
    seconds_.push_back(seconds);
  }
  for (size_t at = seconds_.size() - 1; at-- > 0;) seconds_[at] = std::min(seconds_[at], seconds_[at + 1]);
  const double average = (seconds_.back() - seconds_.front()) / (tokens_.back() - tokens_.front());
  const double least = std::max(kLeastRise * average, kLeastPart * seconds_.front());
  for (size_t at = 1; at < seconds_.size(); at++) {
    seconds_[at] = std::max(seconds_[at], seconds_[at - 1] + least * (tokens_[at] - tokens_[at - 1]));
  }
}

double StepCosts::ratio(int plain, int tokens) const {
  return 1.0 + slopes_[size_class(plain)].median * rise(plain, tokens);
}

void StepCosts::observe(int plain, int tokens, double seconds) {
  if (plain < 1 || tokens < plain || !is_time(seconds)) return;
  const Step before = std::exchange(before_, {plain, tokens, seconds});
  if (before.plain != plain || before.tokens == tokens) return;
  const auto [fewer, more] = std::minmax(before.tokens, tokens);
  const double measured = tokens > before.tokens ? seconds / before.seconds : before.seconds / seconds;
  // measured = (1 + slope * rise(more)) / (1 + slope * rise(fewer))
  const double rises = rise(plain, more) - measured * rise(plain, fewer);
  const double slope = rises > 0.0 ? (measured - 1.0) / rises : kMostSlope;
  learn(slopes_[size_class(plain)],
        {std::clamp(slope, kLeastSlope, kMostSlope), std::min(1.0, double(more - fewer) / plain)});
}

double StepCosts::measured(int tokens) const {
  const auto found = std::lower_bound(tokens_.begin() + 1, tokens_.end() - 1, tokens);
  const size_t at = size_t(found - tokens_.begin());
  const double slope = (seconds_[at] - seconds_[at - 1]) / (tokens_[at] - tokens_[at - 1]);
  return seconds_[at] + slope * (tokens - tokens_[at]);
}

double StepCosts::rise(int plain, int tokens) const { return measured(tokens) / measured(plain) - 1.0; }

size_t StepCosts::size_class(int plain) { return size_t(std::bit_width(unsigned(std::max(plain, 1) - 1))) % 32; }

void StepCosts::learn(Slope& slope, Comparison comparison) {
  auto& compared = slope.compared;
  if (compared.size() < kCompared) {
    compared.push_back(comparison);
  } else {
    compared[slope.next] = comparison;
    slope.next = (slope.next + 1) % kCompared;
  }
  auto sorted = compared;
  sorted.push_back({1.0, kMeasuredWeight});
  std::sort(sorted.begin(), sorted.end(), [](const Comparison& a, const Comparison& b) { return a.slope < b.slope; });
  double left = 0.0;
  for (const auto& [_, weight] : sorted) left += weight / 2;
  for (const auto& [at, weight] : sorted) {
    slope.median = at;
    left -= weight;
    if (left <= 0.0) break;
  }
}

std::vector<int> best_lengths(const std::vector<std::vector<double>>& chances, int tokens, const StepCosts& costs,
                              const DraftTerms& terms) {
  std::vector<Offer> offers;
  for (size_t sequence = 0; sequence < chances.size(); sequence++) {
    for (const double chance : chances[sequence]) offers.push_back({chance, sequence});
  }
  // Chances of a sequence fall with every draft, so the likeliest of all never skip one.
  std::stable_sort(offers.begin(), offers.end(), [](const Offer& a, const Offer& b) { return a.chance > b.chance; });
  std::vector<double> gains(chances.size(), 1.0);                         // tokens that are expected of each
  double expected = tokens, best_rate = expected * (1.0 + terms.margin);  // for each time that a plain step takes
  size_t best_count = 0;
  for (size_t count = 1; count <= offers.size(); count++) {
    const auto& [chance, sequence] = offers[count - 1];
    expected += chance;
    gains[sequence] += chance;
    const double longer = costs.ratio(tokens, tokens + int(count));
    if (expected <= best_rate * longer) continue;
    if (terms.least_pace * longer > 1.0) {
      const bool all_may = gains.size() == size_t(tokens);  // else there is one that has no drafts
      const double slowest = all_may ? *std::min_element(gains.begin(), gains.end()) : 1.0;
      if (slowest < terms.least_pace * longer) continue;
    }
    best_rate = expected / longer;
    best_count = count;
  }
  std::vector<int> lengths(chances.size(), 0);
  for (size_t at = 0; at < best_count; at++) lengths[offers[at].sequence]++;
  return lengths;
}

}  // namespace quire
