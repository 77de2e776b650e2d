"""Prompt lookup: what followed the last time that the text had come to the same end, in prompt or output.

Saxena 2023 (prompt lookup decoding). How far to follow depends on what such matches were worth so far and on what the
machine takes for longer steps; matches worth too little are not followed at all.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field

from services.common.speculation import MAX_DRAFT_TOKENS
from services.executor.backends.base import Backend, KvShape
from services.executor.batch import BlockTables
from services.executor.sequences import Sequence
from services.executor.speculation.confidence import Confidence, Verdict
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
    verdicts: bytearray = field(default_factory=bytearray)  # of matches, by the automaton's states
    match: int = 0  # of the last lookup, 0 for none,
    state: int = 0  # its state,
    verdict: int = Verdict.UNTRIED  # what became of it before,
    end: int = 0  # where what followed it begins,
    size: int = 0  # and how long the text was


class NgramProposer:
    """Keeps a suffix automaton with each sequence."""

    name = "ngram"
    detail = ""
    weighs_drafts = True

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
        chances: list[list[float]] = []
        for sequence, most in requests:
            text = sequence.drafting
            if not isinstance(text, _Text):
                text = sequence.drafting = _Text()
            if text.match:
                self._learn(sequence, text)
            automaton = text.automaton
            known = automaton.size
            automaton.add(sequence.tokens[known : known + left])
            left -= automaton.size - known
            if automaton.size == len(sequence.tokens):
                _look_up(text)
            texts.append(text)
            chances.append(self._confidence.chances(text.match, text.verdict)[:most] if text.match else [])
        lengths = best_lengths(chances, tokens, self._costs) if any(chances) else []
        self._silent = 0 if any(lengths) else self._silent + 1
        if self._silent >= TRIED_EVERY and (likely := max(chances)) and likely[0] >= TRIED_CHANCE:
            lengths[chances.index(likely)] = 1
            self._silent = 0
        if not any(lengths):
            return [[] for _ in texts]
        return [_found(*proposed) for proposed in zip(requests, texts, lengths, strict=True)]

    def computed(self, tokens: int, seconds: float) -> None:
        self._costs.observe(tokens, seconds)

    def _learn(self, sequence: Sequence, text: _Text) -> None:
        """Compares what was found last, proposed or not, with what came."""
        tokens, match, size = sequence.tokens, text.match, text.size
        text.match = 0
        compared = min(len(tokens) - size, MAX_DRAFT_TOKENS)
        if not compared:
            return
        accepted = 0
        while accepted < compared and tokens[size + accepted] == tokens[text.end + accepted]:
            accepted += 1
        self._confidence.saw(match, text.verdict, compared, accepted)
        if text.state >= len(text.verdicts):
            text.verdicts.extend(bytes(text.state + 1 - len(text.verdicts)))
        text.verdicts[text.state] = Verdict.RIGHT if accepted else Verdict.WRONG


def _look_up(text: _Text) -> None:
    match, end = text.automaton.match()
    if match:
        state, verdicts = text.automaton.matched, text.verdicts
        text.match, text.state, text.end, text.size = match, state, end, text.automaton.size
        text.verdict = verdicts[state] if state < len(verdicts) else Verdict.UNTRIED


def _found(request: DraftRequest, text: _Text, count: int) -> list[int]:
    """So many tokens as they followed the match before."""
    if not count:
        return []
    found: list[int] = request.sequence.tokens[text.end : text.end + count].tolist()
    period = text.size - text.end
    while len(found) < count:  # the match overlaps the end: the text repeats itself with this period
        found.append(found[len(found) - period])
    return found
