#include "services/executor/native/suffix_automaton.h"

namespace quire {
namespace {

uint64_t key(int32_t state, int32_t token_id) { return uint64_t(uint32_t(state)) << 32 | uint32_t(token_id); }

}  // namespace

void SuffixAutomaton::add(std::span<const int32_t> token_ids) {
  if (matched_ && !token_ids.empty()) {
    states_[matched_].end = size_;
    matched_ = 0;
  }
  for (const int32_t token_id : token_ids) add(token_id);
}

SuffixAutomaton::Match SuffixAutomaton::match() {
  matched_ = size_ ? states_[last_].link : 0;
  if (!matched_) return {};
  return {states_[matched_].length, states_[matched_].end, matched_};
}

void SuffixAutomaton::add(int32_t token_id) {
  size_++;
  const int32_t added = new_state(states_[last_].length + 1, size_);
  int32_t state = last_;
  last_ = added;
  const int32_t* found = nullptr;
  while (state >= 0 && !(found = transition(state, token_id))) {
    add_transition(state, token_id, added);
    state = states_[state].link;
  }
  if (state < 0) {
    states_[added].link = 0;
  } else if (const int32_t target = *found; states_[state].length + 1 == states_[target].length) {
    states_[added].link = target;
  } else {
    const int32_t shorter = split(state, token_id, target);
    states_[added].link = states_[target].link = shorter;
  }
}

// A state for those substrings of `target` that are no longer than a step from `state`.
int32_t SuffixAutomaton::split(int32_t state, int32_t token_id, int32_t target) {
  const int32_t shorter = new_state(states_[state].length + 1, states_[target].end);
  states_[shorter].link = states_[target].link;
  if (states_[target].token >= 0) add_transition(shorter, states_[target].token, states_[target].target);
  for (int32_t at = states_[target].others; at >= 0; at = branches_[at].next) {
    add_transition(shorter, branches_[at].token, branches_[at].target);
  }
  while (state >= 0) {
    int32_t* found = transition(state, token_id);
    if (!found || *found != target) break;
    *found = shorter;
    state = states_[state].link;
  }
  return shorter;
}

int32_t SuffixAutomaton::new_state(int32_t length, int32_t end) {
  states_.push_back({.length = length, .end = end});
  return int32_t(states_.size()) - 1;
}

int32_t* SuffixAutomaton::transition(int32_t state, int32_t token_id) {
  State& from = states_[state];
  if (from.token == token_id) return &from.target;
  if (from.others < 0) return nullptr;
  const auto found = branch_of_.find(key(state, token_id));
  return found == branch_of_.end() ? nullptr : &branches_[found->second].target;
}

void SuffixAutomaton::add_transition(int32_t state, int32_t token_id, int32_t target) {
  State& from = states_[state];
  if (from.token < 0) {
    from.token = token_id;
    from.target = target;
    return;
  }
  branch_of_[key(state, token_id)] = int32_t(branches_.size());
  branches_.push_back({token_id, target, from.others});
  from.others = int32_t(branches_.size()) - 1;
}

}  // namespace quire
