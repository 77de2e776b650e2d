"""Prompt lookup: what followed the last time that the text had come to the same end, in prompt or output.

Saxena 2023 (prompt lookup decoding). How far to follow depends on what such matches were worth so far and on what the
machine takes for longer steps; matches worth too little are not followed at all.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field

from services.executor.backends.base import Backend, KvShape
from services.executor.batch import BlockTables
from services.executor.sequences import Sequence
from services.executor.speculation.confidence import Confidence
from services.executor.speculation.costs import StepCosts, best_lengths
from services.executor.speculation.proposer import DraftRequest
from services.executor.speculation.suffix_automaton import SuffixAutomaton
from services.executor.warmup import verify_costs

MOST_TAKEN = 2048
"""Tokens that automata take in before one step: a long prompt is taken in over several, which go on without drafts."""

TRIED_EVERY, TRIED_CHANCE = 64, 0.5
"""After so many steps without drafts one that is so likely is verified though it seems not to pay: longer steps may
cost less than is believed, which only they can tell."""


@dataclass(slots=True)
class _Text:
    """What is kept with a sequence."""

    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    match: int = 0  # of the last lookup, 0 for none,
    found: list[int] = field(default_factory=list)  # what followed it before,
    size: int = 0  # and how long the text was


class NgramProposer:
    """Keeps a suffix automaton with each sequence."""

    name = "ngram"
    detail = ""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._confidence = Confidence()
        self._costs = StepCosts([(1, 1.0), (2, 1.0)])  # until measured, drafts cost nothing
        self._silent = 0  # steps since drafts were proposed

    def warm_up(self, shape: KvShape) -> float:
        measured = verify_costs(self._backend, shape)
        if len(measured) > 1:  # else there is no room for drafts
            self._costs = StepCosts(measured)
        return 0.0

    def catch_up(self, requests: Sequence_[DraftRequest]) -> list[bool]:
        """What is long is taken in while proposing, which costs next to nothing."""
        return [True] * len(requests)

    def propose(self, requests: Sequence_[DraftRequest], tables: BlockTables, tokens: int) -> list[list[int]]:
        left = MOST_TAKEN
        texts: list[_Text] = []
        for sequence, most in requests:
            text = sequence.drafting
            if not isinstance(text, _Text):
                text = sequence.drafting = _Text()
            self._learn(sequence, text)
            known = text.automaton.size
            text.automaton.add(sequence.tokens[known : known + left])
            left -= text.automaton.size - known
            if text.automaton.size == len(sequence.tokens):
                _look_up(sequence, text, most)
            texts.append(text)
        chances = [self._confidence.chances(text.match, len(text.found)) if text.match else [] for text in texts]
        lengths = best_lengths(chances, tokens, self._costs) if any(chances) else [0] * len(texts)
        self._silent = 0 if any(lengths) else self._silent + 1
        if self._silent >= TRIED_EVERY and (likely := max(chances, default=[])) and likely[0] >= TRIED_CHANCE:
            lengths[chances.index(likely)] = 1
            self._silent = 0
        return [text.found[:length] for text, length in zip(texts, lengths, strict=True)]

    def computed(self, tokens: int, seconds: float) -> None:
        self._costs.observe(tokens, seconds)

    def _learn(self, sequence: Sequence, text: _Text) -> None:
        """Compares what was found last, proposed or not, with what came."""
        if not text.match:
            return
        came = sequence.tokens[text.size : text.size + len(text.found)]
        accepted = 0
        for found, token_id in zip(text.found, came, strict=False):
            if found != token_id:
                break
            accepted += 1
        self._confidence.saw(text.match, len(came), accepted)
        text.match, text.found = 0, []


def _look_up(sequence: Sequence, text: _Text, most: int) -> None:
    match, end = text.automaton.match()
    if not match:
        return
    found: list[int] = sequence.tokens[end : end + most].tolist()
    period = len(sequence.tokens) - end
    while len(found) < most:  # the match overlaps the end: the text repeats itself with this period
        found.append(found[len(found) - period])
    text.match, text.found, text.size = match, found, len(sequence.tokens)
