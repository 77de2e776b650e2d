"""How many drafts are accepted: of each sequence as a whole, and by position for sequences that are alike. Pure.

A sequence has too few steps to tell sixteen positions apart, so sequences are sorted into kinds by the part of their
drafts that was accepted, and positions are counted for each kind. What a kind is called has no weight then: its counts
say what became of the drafts of those that were found in it.
"""

from __future__ import annotations

from bisect import bisect_right

from services.common.speculation import MAX_DRAFT_TOKENS

EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.975)
"""Between two kinds: closer together where a little more is worth many drafts."""
KINDS = len(EDGES) + 1
NOMINAL = tuple((low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True))
STAY = 0.04
"""A sequence leaves its kind once its part is so far beyond the edge."""
SEQUENCE_MEMORY, SEQUENCE_PRIOR = 64.0, 4.0
"""Drafts tried that a sequence's part counts at most, and what all others weigh beside them."""
ALL_MEMORY, ALL_PRIOR, FIRST_GUESS = 2048.0, 16.0, 0.6
KIND_MEMORY, KIND_PRIOR = 1024.0, 8.0
"""Steps that a kind's counts hold at most, and what is expected of it weighs beside them."""


class Habit:
    """What is known of one sequence's drafts. It stays with the sequence wherever it is computed."""

    __slots__ = ("accepted", "gain", "kind", "most", "tried")

    def __init__(self, most: int) -> None:
        """`most`: the drafts of a step that its request admits."""
        self.most = most
        self.accepted = self.tried = 0.0
        self.gain = 0.0  # drafts accepted in a step of late
        self.kind = -1  # none before it was looked at


class Depths:
    """What became of the drafts of one kind's steps, counted by how many there were."""

    __slots__ = ("accepted", "filled", "proposed", "spent", "steps")

    def __init__(self) -> None:
        self.steps = 0.0
        self.proposed = [0.0] * (MAX_DRAFT_TOKENS + 1)  # steps with so many proposed
        self.accepted = [0.0] * (MAX_DRAFT_TOKENS + 1)  # with so many accepted
        self.spent = [0.0] * (MAX_DRAFT_TOKENS + 1)  # with so many accepted and no more proposed
        self.filled = [0.0] * (MAX_DRAFT_TOKENS + 1)  # with so many proposed and no more admitted

    def add(self, limit: int, proposed: int, accepted: int) -> None:
        self.steps += 1.0
        self.proposed[proposed] += 1.0
        self.accepted[accepted] += 1.0
        if accepted == proposed:
            self.spent[accepted] += 1.0
        if proposed == limit:
            self.filled[proposed] += 1.0
        if self.steps > KIND_MEMORY:
            self.steps /= 2
            for counts in (self.proposed, self.accepted, self.spent, self.filled):
                counts[:] = [count / 2 for count in counts]

    def expect(self, guess: float) -> tuple[list[float], list[float]]:
        """For each position from the first: how likely a draft is proposed there, and accepted, where it is admitted.

        A position is accepted only behind those before it. `guess` is what is expected of the first one before any was
        seen; each further one is expected to be like the one before it.
        """
        is_proposed, is_accepted = [], []
        proposed = accepted = self.steps
        proposing, accepting, chance = 1.0, 1.0, guess
        for position in range(1, MAX_DRAFT_TOKENS + 1):
            asked = proposed - self.filled[position - 1]  # steps that could have proposed one more
            tried = accepted - self.spent[position - 1]  # steps in which one more was tried
            proposed -= self.proposed[position - 1]
            accepted -= self.accepted[position - 1]
            proposes = (proposed + KIND_PRIOR) / (max(asked, proposed) + KIND_PRIOR)
            chance = (accepted + KIND_PRIOR * chance) / (max(tried, accepted) + KIND_PRIOR)
            proposing *= proposes
            accepting *= proposes * chance
            is_proposed.append(proposing)
            is_accepted.append(accepting)
        return is_proposed, is_accepted


class Acceptance:
    """Of all sequences that one executor computes."""

    def __init__(self) -> None:
        self._accepted, self._tried = ALL_PRIOR * FIRST_GUESS, ALL_PRIOR
        self.kinds = [Depths() for _ in range(KINDS)]

    @property
    def overall(self) -> float:
        """Part of all drafts tried that was accepted; old ones fade."""
        return self._accepted / self._tried

    def meet(self, habit: Habit) -> int:
        """The kind of a sequence."""
        if habit.kind < 0:
            self.sort(habit)
        return habit.kind

    def add(self, habit: Habit, limit: int, proposed: int, accepted: int) -> None:
        """Takes in one step of a sequence, in which `limit` drafts were admitted, at least one."""
        self.kinds[self.meet(habit)].add(limit, proposed, accepted)
        tried = accepted + (accepted < proposed)
        if not tried:
            return
        self._accepted += accepted
        self._tried += tried
        if self._tried > ALL_MEMORY:
            self._accepted, self._tried = self._accepted / 2, self._tried / 2
        habit.accepted += accepted
        habit.tried += tried
        if habit.tried > SEQUENCE_MEMORY:
            fade = SEQUENCE_MEMORY / habit.tried
            habit.accepted, habit.tried = habit.accepted * fade, SEQUENCE_MEMORY
        self.sort(habit)

    def sort(self, habit: Habit) -> None:
        """Finds a sequence's kind by what is known now: of itself, and, as far as that is little, of all others."""
        part = (habit.accepted + SEQUENCE_PRIOR * self.overall) / (habit.tried + SEQUENCE_PRIOR)
        kind = habit.kind
        if kind >= 0:
            low = EDGES[kind - 1] - STAY if kind else 0.0
            high = EDGES[kind] + STAY if kind < KINDS - 1 else 1.0
            if low <= part <= high:
                return
        habit.kind = bisect_right(EDGES, part)
