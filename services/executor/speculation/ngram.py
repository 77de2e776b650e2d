"""Prompt lookup: what followed the last time that the text had come to the same end, in prompt or output.

Saxena 2023 (prompt lookup decoding). How far to follow depends on what such matches were worth so far and on what the
machine takes for longer steps; matches worth too little are not followed at all. All of that is native code: Python
alone would take some percent of a step.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_

import numpy as np

from kernels import _native
from services.common.speculation import LEAST_PACE, MAX_DRAFT_TOKENS
from services.executor.backends.base import Backend, KvShape
from services.executor.batch import BlockTables
from services.executor.speculation.proposer import DraftRequest
from services.executor.warmup import verify_costs

MARGIN = 0.05
"""Drafts must promise so much more than none: chances and costs are estimates, and the best of many is flattered."""
MOST_TAKEN = 2048
"""Tokens that texts take in before one step: a long prompt is taken in over several, which go on without drafts."""
TRIED_EVERY, TRIED_CHANCE = 64, 0.5
"""After so many steps without drafts one that is so likely is verified though it seems not to pay: longer steps may
cost less than is believed, which only they can tell."""
UNMEASURED = ((1, 1.0), (2, 1.0))
"""Until measured, drafts cost next to nothing."""


class NgramProposer:
    """Keeps a suffix automaton with each sequence, and learns from all of them."""

    name = "ngram"
    detail = ""
    weighs_drafts = True

    def __init__(
        self,
        backend: Backend,
        costs: Sequence_[tuple[int, float]] = UNMEASURED,
        most_taken: int = MOST_TAKEN,
        margin: float = MARGIN,
    ) -> None:
        """`costs`: tokens of a step and its seconds, ascending by tokens; the others as MOST_TAKEN and MARGIN."""
        self._backend, self._most_taken, self._margin = backend, most_taken, margin
        self._learn_anew(costs)

    def _learn_anew(self, costs: Sequence_[tuple[int, float]]) -> None:
        self._lookup = _native.PromptLookup(
            costs,
            most_drafts=MAX_DRAFT_TOKENS,
            margin=self._margin,
            least_pace=LEAST_PACE,
            most_taken=self._most_taken,
            tried_every=TRIED_EVERY,
            tried_chance=TRIED_CHANCE,
        )

    def warm_up(self, shape: KvShape) -> float:
        measured = verify_costs(self._backend, shape)
        if len(measured) > 1:  # else there is no room for drafts
            self._learn_anew(measured)
        return 0.0

    def catch_up(self, requests: Sequence_[DraftRequest]) -> list[bool]:
        """What is long is taken in while proposing, which costs next to nothing."""
        return [True] * len(requests)

    def propose(self, requests: Sequence_[DraftRequest], tables: BlockTables, tokens: int) -> list[list[int]]:
        texts: list[_native.LookupText] = []
        for sequence, _ in requests:
            text = sequence.drafting
            if not isinstance(text, _native.LookupText):
                text = sequence.drafting = _native.LookupText()
            texts.append(text)
        token_ids = [np.frombuffer(sequence.tokens, np.int32) for sequence, _ in requests]
        return self._lookup.propose(texts, token_ids, [most for _, most in requests], tokens)

    def computed(self, plain: int, tokens: int, seconds: float) -> None:
        self._lookup.computed(plain, tokens, seconds)
