#include "services/executor/native/draft_confidence.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace quire {
namespace {

// The least match of each class, and how likely its first draft is before anything was seen: what English chats and
// code had on average.
constexpr std::array<int32_t, 10> kMatches = {1, 2, 3, 4, 5, 6, 8, 12, 16, 32};
constexpr std::array<double, 10> kAtFirst = {0.2, 0.45, 0.55, 0.65, 0.7, 0.75, 0.8, 0.82, 0.9, 0.95};
constexpr std::array<double, kVerdicts> kExponents = {1.0, 2.0, 0.6};  // of that, by verdict
constexpr double kPerPlace = 0.02, kMostAtFirst = 0.95;                // a draft behind accepted ones is likelier
constexpr double kWeight = 20.0;                                       // drafts seen that count as much
constexpr double kMemory = 2000.0;  // drafts seen at one place that count: older ones fade
constexpr double kLeastChance = 0.02;

}  // namespace

DraftConfidence::DraftConfidence(int places) : places_(places) {
  for (const double at_first : kAtFirst) {
    for (const double exponent : kExponents) {
      const double chance = std::pow(at_first, exponent);
      for (int place = 0; place < places; place++) {
        const double there = std::max(chance, std::min(chance + kPerPlace * place, kMostAtFirst));
        seen_.push_back({kWeight, kWeight * there});
      }
    }
  }
}

void DraftConfidence::chances(int32_t match, Verdict verdict, int most, std::vector<double>& chances) const {
  chances.clear();
  const Place* seen = &seen_[first(match, verdict)];
  double chance = 1.0;
  for (int place = 0; place < std::min(most, places_); place++) {
    chance *= seen[place].accepted / seen[place].tried;
    if (chance < kLeastChance) break;
    chances.push_back(chance);
  }
}

void DraftConfidence::saw(int32_t match, Verdict verdict, int compared, int accepted) {
  Place* seen = &seen_[first(match, verdict)];
  for (int place = 0; place < std::min({accepted + 1, compared, places_}); place++) {
    if (seen[place].tried >= kMemory) {
      seen[place].tried *= 0.5;
      seen[place].accepted *= 0.5;
    }
    seen[place].tried += 1.0;
    seen[place].accepted += place < accepted;
  }
}

size_t DraftConfidence::first(int32_t match, Verdict verdict) const {
  const auto above = std::upper_bound(kMatches.begin(), kMatches.end(), match);
  return ((above - kMatches.begin() - 1) * kVerdicts + verdict) * size_t(places_);
}

}  // namespace quire
