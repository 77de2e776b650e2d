"""Beam search over log probabilities: which paths go on, which are finished, and when the search is over. Pure.

Of all continuations of the running paths those with the highest total log probability are looked at. An end token among
the first `width` of them finishes a path, one further down is dropped; the first `width` others go on. At `max_tokens`
the first `width` are finished, whatever they end with. A finished path's score is its total divided by its length, end
token included, to the power of `length_penalty`; the best `width` are kept. The search is over once there are that
many and the best running path, scored at its present length, is no better than the worst of them. So does
`generate(num_beams=...)` of transformers, whose answers this gives.

Of equal totals the one behind the better path comes first, then the smaller token id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Option(NamedTuple):
    """A token that may come next, with its natural log probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, eq=False)
class Path:
    """One output: a token behind a shorter path."""

    before: Path | None  # None where it is empty
    token_id: int
    logprob: float  # of that token
    total: float  # of all tokens
    length: int
    options: Sequence[Option]  # what the token was chosen from, most likely first

    def then(self, option: Option, options: Sequence[Option]) -> Path:
        """This path with one more token."""
        return Path(self, option.token_id, option.logprob, self.total + option.logprob, self.length + 1, options)

    def steps(self) -> list[Path]:
        """The paths that end with each of its tokens, in order."""
        found: list[Path] = []
        path = self
        while path.before is not None:
            found.append(path)
            path = path.before
        return found[::-1]


EMPTY = Path(None, -1, 0.0, 0.0, 0, ())


class Finished(NamedTuple):
    """A path that is over."""

    score: float
    path: Path


@dataclass(frozen=True, slots=True)
class Rule:
    """What a search looks for."""

    width: int
    length_penalty: float
    end_ids: frozenset[int]
    min_tokens: int  # no end token among so many first ones
    max_tokens: int

    @property
    def option_count(self) -> int:
        """Most likely tokens of a path that a step must know: as many others as end tokens may stand before them."""
        return self.width + len(self.end_ids)

    def score(self, total: float, length: int) -> float:
        divisor: float = float(length) ** self.length_penalty
        return total / divisor


@dataclass(slots=True)
class Search:
    """A search under way."""

    rule: Rule
    finished: list[Finished] = field(default_factory=list)  # best first

    def advance(self, running: Sequence[Path], options: Sequence[Sequence[Option]]) -> list[tuple[int, Path]]:
        """Takes one step of all running paths, best first; `options[i]` may follow running[i].

        Returns those that go on, best first, each with the index of the path that it continues. None: it is over.
        """
        rule, going = self.rule, list[tuple[int, Path]]()
        for rank, (index, option) in enumerate(self._ranked(running, options)):
            path = running[index].then(option, options[index])
            if path.token_id not in rule.end_ids and path.length < rule.max_tokens:
                going.append((index, path))
            elif rank < rule.width:
                self._finish(path)
            if len(going) == rule.width:
                break  # those further down neither go on nor finish
        return [] if not going or self._is_decided(going[0][1]) else going

    def _ranked(self, running: Sequence[Path], options: Sequence[Sequence[Option]]) -> list[tuple[int, Option]]:
        """All continuations that may be, most likely first, each with the index of what it continues."""
        may_end = running[0].length >= self.rule.min_tokens
        found = [
            (index, option)
            for index, following in enumerate(options)
            for option in following
            if may_end or option.token_id not in self.rule.end_ids
        ]
        return sorted(found, key=lambda f: (-(running[f[0]].total + f[1].logprob), f[0], f[1].token_id))

    def _finish(self, path: Path) -> None:
        self.finished.append(Finished(self.rule.score(path.total, path.length), path))
        self.finished.sort(key=lambda finished: -finished.score)
        del self.finished[self.rule.width :]

    def _is_decided(self, best: Path) -> bool:
        """Whether no running path is taken to become better than all that are finished."""
        enough = len(self.finished) == self.rule.width
        return enough and self.rule.score(best.total, best.length) <= self.finished[-1].score
