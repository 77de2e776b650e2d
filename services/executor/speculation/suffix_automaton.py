"""Where the end of a growing text occurred before: its suffix automaton (Blumer et al. 1985).

A state stands for all substrings that end at the same places. The suffix link of the state of the whole text is the
longest suffix that occurs elsewhere too. A token costs amortized O(1), however long the text is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

NONE = -1


class SuffixAutomaton:
    """Of the tokens added so far."""

    # Nearly every state of a text over a large vocabulary has one successor: that lies in two arrays, which take a
    # tenth of the memory of a dictionary for each.
    __slots__ = ("_branches", "_ends", "_last", "_lengths", "_links", "_targets", "_tokens", "matched", "size")

    def __init__(self) -> None:
        self._lengths = array("i", [0])  # of the longest substring
        self._links = array("i", [NONE])
        self._ends = array("i", [NONE])  # where it ended once
        self._tokens = array("i", [NONE])  # the first transition that the state got,
        self._targets = array("i", [NONE])
        self._branches: dict[int, dict[int, int]] = {}  # and the others
        self._last = 0
        self.matched = 0  # the state of the last match, whose nearest place is the present end; 0 for none
        self.size = 0

    def add(self, token_ids: Sequence[int]) -> None:
        """Appends tokens, each at least 0."""
        if self.matched and token_ids:
            self._ends[self.matched] = self.size
            self.matched = 0
        for token_id in token_ids:
            self._add(token_id)

    def match(self) -> tuple[int, int]:
        """The longest suffix that occurred before, perhaps overlapping: its length and where it ended (exclusive), as
        late as is known. Length 0 where even the last token is new.
        """
        state = self._links[self._last] if self.size else 0
        self.matched = state
        return (self._lengths[state], self._ends[state]) if state else (0, 0)

    def _add(self, token_id: int) -> None:
        tokens, targets, links, lengths = self._tokens, self._targets, self._links, self._lengths
        self.size += 1
        new = self._state(lengths[self._last] + 1, self.size)
        state = self._last
        self._last = new
        target = NONE
        while state != NONE:
            target = targets[state] if tokens[state] == token_id else self._branch(state, token_id)
            if target != NONE:
                break
            if tokens[state] == NONE:
                tokens[state], targets[state] = token_id, new
            else:
                self._branches.setdefault(state, {})[token_id] = new
            state = links[state]
        if state == NONE:
            links[new] = 0
        elif lengths[state] + 1 == lengths[target]:
            links[new] = target
        else:
            links[new] = links[target] = self._split(state, token_id, target)

    def _split(self, state: int, token_id: int, target: int) -> int:
        """A state for those substrings of `target` that are no longer than a step from `state`."""
        tokens, targets, links = self._tokens, self._targets, self._links
        shorter = self._state(self._lengths[state] + 1, self._ends[target])
        links[shorter] = links[target]
        tokens[shorter], targets[shorter] = tokens[target], targets[target]
        if target in self._branches:
            self._branches[shorter] = dict(self._branches[target])
        while state != NONE:
            if tokens[state] == token_id and targets[state] == target:
                targets[state] = shorter
            elif self._branch(state, token_id) == target:
                self._branches[state][token_id] = shorter
            else:
                break
            state = links[state]
        return shorter

    def _branch(self, state: int, token_id: int) -> int:
        branches = self._branches.get(state)
        return branches.get(token_id, NONE) if branches is not None else NONE

    def _state(self, length: int, end: int) -> int:
        self._lengths.append(length)
        self._ends.append(end)
        self._links.append(NONE)
        self._tokens.append(NONE)
        self._targets.append(NONE)
        return len(self._lengths) - 1
