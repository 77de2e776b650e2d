// Where the end of a growing text occurred before: its suffix automaton (Blumer et al. 1985).
//
// A state stands for all substrings that end at the same places. The suffix link of the state of the whole text is the
// longest suffix that occurs elsewhere too. A token costs amortized O(1), however long the text is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace quire {

class SuffixAutomaton {
 public:
  struct Match {
    int32_t length = 0;  // 0 where even the last token is new; then the rest means nothing
    int32_t end = 0;     // where it ended before (exclusive), as late as is known
    int32_t state = 0;   // the same number whenever the text comes to this match again
  };

  // Appends tokens, each at least 0.
  void add(std::span<const int32_t> token_ids);
  // The longest suffix that occurred before, perhaps overlapping.
  Match match();
  int32_t size() const { return size_; }
  size_t state_count() const { return states_.size(); }

 private:
  // Nearly every state of a text over a large vocabulary has one successor: that lies in the state itself.
  struct State {
    int32_t length;       // of the longest substring
    int32_t link = -1;    // suffix link
    int32_t end;          // where it ended once
    int32_t token = -1;   // the first transition that the state got,
    int32_t target = -1;  // and where it leads
    int32_t others = -1;  // the latest of the further ones
  };
  struct Branch {
    int32_t token, target, next;
  };

  void add(int32_t token_id);
  int32_t split(int32_t state, int32_t token_id, int32_t target);
  int32_t new_state(int32_t length, int32_t end);
  // Where a transition leads, or nullptr; good until the next one is added.
  int32_t* transition(int32_t state, int32_t token_id);
  void add_transition(int32_t state, int32_t token_id, int32_t target);

  std::vector<State> states_ = {{.length = 0, .end = -1}};
  std::vector<Branch> branches_;
  std::unordered_map<uint64_t, int32_t> branch_of_;  // by state and token
  int32_t last_ = 0, matched_ = 0, size_ = 0;        // matched_: its nearest place is the present end; 0 for none
};

}  // namespace quire
