"""Drafts of a smaller model of the same vocabulary, in the same process, with keys and values of its own."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_

from services.executor.backends.base import Backend, KvShape
from services.executor.batch import BlockTables
from services.executor.speculation.chain import Chain, extend
from services.executor.speculation.draft_cache import DraftCache
from services.executor.speculation.proposer import DraftRequest
from services.executor.warmup import timed_step

MOST_CAUGHT_UP = 512
"""Tokens that the draft model computes before one step beside drafts: it catches up with a long text over several."""


class DraftProposer:
    """Its model computes nothing while nothing is to be drafted, and catches up when something is."""

    name = "draft"

    def __init__(self, backend: Backend, cache: DraftCache, detail: str) -> None:
        self._backend, self._cache, self.detail = backend, cache, detail

    def warm_up(self, shape: KvShape) -> float:
        return min(timed_step(self._backend, shape, 0, 1) for _ in range(3))

    def propose(self, requests: Sequence_[DraftRequest], tables: BlockTables, tokens: int) -> list[list[int]]:
        cache, context = self._cache, self._backend.spec.context_length
        chains: list[Chain] = []
        left = MOST_CAUGHT_UP
        for sequence, most in requests:
            size = len(sequence.tokens)
            # The last draft is not computed here.
            room = min(most, min(cache.slots(sequence), context) - size + 1)
            if room < 1:
                chains.append(Chain(sequence, 0, 0))  # past this model's limit: plain decoding
                continue
            computed = cache.computed(sequence)
            end = min(size, computed + left)
            left -= end - computed
            chains.append(Chain(sequence, computed, room if end == size > computed else 0, end))
        active = [chain for chain in chains if chain.computed < chain.end]
        extend(active, self._backend.step, lambda some: cache.gather([chain.sequence for chain in some]))
        for chain in active:
            cache.wrote(chain.sequence, chain.computed, chain.draft_ids)
        return [chain.draft_ids for chain in chains]

    def computed(self, tokens: int, seconds: float) -> None:
        """How many drafts pay is its scheduler's to say."""
