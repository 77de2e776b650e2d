// How likely copied drafts are to be accepted: learned as it goes, by the length of the match that they continue and by
// what became of that match before. What is learned on one sequence serves all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace quire {

// What became of a match when the text last came to it.
enum Verdict : uint8_t { kUntried, kWrong, kRight };
inline constexpr int kVerdicts = 3;

class DraftConfidence {
 public:
  // `places`: the most drafts of a sequence in a step.
  explicit DraftConfidence(int places);

  int places() const { return places_; }
  // Replaces `chances` by how likely each draft behind a match of so many tokens, at least 1, and all before it are
  // accepted, for `most` drafts at most. They fall, and end before those that would pay on no machine.
  void chances(int32_t match, Verdict verdict, int most, std::vector<double>& chances) const;
  // Of `compared` drafts behind a match, the first `accepted` were what came, and the next, if any, was not.
  void saw(int32_t match, Verdict verdict, int compared, int accepted);

 private:
  struct Place {
    double tried, accepted;
  };
  size_t first(int32_t match, Verdict verdict) const;  // of a class's places

  int places_;
  std::vector<Place> seen_;  // by class and place
};

}  // namespace quire
