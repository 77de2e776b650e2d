"""How long an answer will be: running quantiles of those that ended, by tenant, model and length of the prompt.

Lengths fall into buckets that grow by a constant factor, which bounds the relative error (as DDSketch: Masson, Rim and
Lee, VLDB 2019); old ones fade. An answer that was cut short says only that it would have been longer: the product-limit
estimator (Kaplan and Meier, 1958) takes it as that, and also tells what is left of one that has some tokens already.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from typing import NamedTuple, Protocol

GROWTH = 1.25
MEMORY = 256.0
"""Weight of all answers of a kind together: beyond it, the older half of the weight fades."""
LEAST_WEIGHT = 8.0
"""With fewer answers than this a kind says nothing, and a coarser one is asked."""
MOST_KINDS = 4096


class Kind(NamedTuple):
    """What an answer's length depends on, as far as a scheduler can see."""

    tenant: str
    model: str
    prompt_length: int


class LengthPredictor(Protocol):
    """Learns from answers that ended. Deterministic: the same calls give the same answers."""

    def ended(self, kind: Kind, length: int) -> None:
        """An answer of `length` tokens ended by itself."""
        ...

    def cut(self, kind: Kind, length: int) -> None:
        """An answer was cut behind `length` tokens: by its budget or its client."""
        ...

    def expect(self, kind: Kind, length: int, most: int) -> int:
        """Tokens in all of an answer that has `length` already and will never have more than `most`."""
        ...


def _edges() -> list[int]:
    edges = [1]
    while edges[-1] < 1 << 24:
        edges.append(max(edges[-1] + 1, round(edges[-1] * GROWTH)))
    return edges


EDGES = _edges()
"""Longest answer of each bucket, in tokens."""


def _bucket(length: int) -> int:
    return min(bisect_left(EDGES, length), len(EDGES) - 1)


class _Lengths:
    """Answers of one kind by length: those that ended by themselves, and those that were cut."""

    __slots__ = ("_cut", "_ended", "_weight")

    def __init__(self) -> None:
        self._ended = [0.0] * len(EDGES)
        self._cut = [0.0] * len(EDGES)
        self._weight = 0.0

    def ended(self, length: int) -> None:
        self._ended[_bucket(length)] += 1
        self._fade()

    def cut(self, length: int) -> None:
        self._cut[_bucket(length)] += 1
        self._fade()

    def _fade(self) -> None:
        self._weight += 1
        if self._weight >= MEMORY:
            self._ended = [weight / 2 for weight in self._ended]
            self._cut = [weight / 2 for weight in self._cut]
            self._weight /= 2

    def quantile(self, level: float, length: int) -> int | None:
        """Length that a part `level` of those longer than `length` does not exceed.

        0 where all but a smaller part was cut below it; None where too few answers are that long.
        """
        first = _bucket(length + 1)
        at_risk = sum(self._ended[first:]) + sum(self._cut[first:])
        if at_risk < LEAST_WEIGHT:
            return None
        surviving = 1.0
        for index in range(first, len(EDGES)):
            ended = self._ended[index]
            if ended:
                surviving *= 1 - ended / at_risk
                if surviving <= 1 - level:
                    return EDGES[index]
            at_risk -= ended + self._cut[index]
            if at_risk <= 0:
                break
        return 0


class QuantilePredictor:
    """A quantile of what ended before. Asks the finest kind that has seen enough: tenant, model and prompt length;
    tenant and model; model. Where none has, the budget itself is expected. Bounded memory: kinds unused longest go.
    """

    def __init__(self, level: float = 0.5) -> None:
        """`level` in (0, 1): 0.5 is the median."""
        self._level = level
        self._kinds: OrderedDict[tuple[str, ...], _Lengths] = OrderedDict()

    def __len__(self) -> int:
        """Kinds held."""
        return len(self._kinds)

    def ended(self, kind: Kind, length: int) -> None:
        for lengths in self._learning(kind):
            lengths.ended(length)

    def cut(self, kind: Kind, length: int) -> None:
        if length > 0:
            for lengths in self._learning(kind):
                lengths.cut(length)

    def expect(self, kind: Kind, length: int, most: int) -> int:
        for key in _keys(kind):
            lengths = self._kinds.get(key)
            found = lengths.quantile(self._level, length) if lengths is not None else None
            if found is not None:
                return min(most, max(found, length + 1)) if found else most
        return most

    def _learning(self, kind: Kind) -> list[_Lengths]:
        """What shall learn of an answer of this kind."""
        learning = []
        for key in _keys(kind):
            lengths = self._kinds.get(key)
            if lengths is None:
                lengths = self._kinds[key] = _Lengths()
                if len(self._kinds) > MOST_KINDS:
                    self._kinds.popitem(last=False)
            self._kinds.move_to_end(key)
            learning.append(lengths)
        return learning


def _keys(kind: Kind) -> tuple[tuple[str, ...], ...]:
    """Finest first. Prompts of one bucket differ by less than a factor of two."""
    prompt = str(kind.prompt_length.bit_length())
    return (kind.model, kind.tenant, prompt), (kind.model, kind.tenant), (kind.model,)
