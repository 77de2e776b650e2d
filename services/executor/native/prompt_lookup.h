// Prompt lookup (Saxena 2023): what followed the last time that a text had come to the same end, as far as that pays.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "services/executor/native/draft_confidence.h"
#include "services/executor/native/step_costs.h"
#include "services/executor/native/suffix_automaton.h"

namespace quire {

// What is kept with a sequence.
class LookupText {
 public:
  // Compares what was found last, proposed or not, with what came.
  void learn(std::span<const int32_t> token_ids, DraftConfidence& confidence);
  // Takes in up to `most` tokens of the text; how many it took.
  int take(std::span<const int32_t> token_ids, int most);
  // Looks for the present end, unless the text is not taken in yet.
  void look_up(std::span<const int32_t> token_ids);
  int32_t size() const { return automaton_.size(); }  // tokens taken in
  bool found() const { return match_.length > 0; }
  void chances(const DraftConfidence& confidence, int most, std::vector<double>& chances) const;
  // So many tokens as they followed the match before.
  std::vector<int32_t> drafts(std::span<const int32_t> token_ids, int count) const;

 private:
  SuffixAutomaton automaton_;
  std::vector<uint8_t> verdicts_;  // of matches, by the automaton's states
  SuffixAutomaton::Match match_;   // of the last lookup,
  Verdict verdict_ = kUntried;     // what became of it before,
  int32_t size_ = 0;               // and how long the text was
};

struct LookupRules {
  DraftTerms terms;
  int most_taken;       // tokens that texts take in before one step
  int tried_every;      // after so many steps without drafts
  double tried_chance;  // one that is so likely is verified though it seems not to pay
};

// One sequence all of whose tokens are computed in the coming step.
struct LookupRequest {
  LookupText* text;
  std::span<const int32_t> token_ids;
  int most;  // drafts, at least 1
};

class PromptLookup {
 public:
  PromptLookup(int places, const LookupRules& rules, const StepCosts& costs)
      : confidence_(places), rules_(rules), costs_(costs) {}

  // Drafts of each sequence, perhaps none. `tokens` the step has without them.
  std::vector<std::vector<int32_t>> propose(std::span<const LookupRequest> requests, int tokens);
  StepCosts& costs() { return costs_; }

 private:
  DraftConfidence confidence_;
  LookupRules rules_;
  StepCosts costs_;
  int silent_ = 0;                            // steps since drafts were proposed
  std::vector<std::vector<double>> chances_;  // scratch
};

}  // namespace quire
