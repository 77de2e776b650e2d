"""Drafts of a smaller model of the same vocabulary, in the same process, with keys and values of its own."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_

from services.executor.backends.base import Backend, KvShape
from services.executor.batch import BlockTables
from services.executor.sequences import Sequence
from services.executor.speculation.chain import Chain, extend
from services.executor.speculation.draft_cache import DraftCache
from services.executor.speculation.proposer import DraftRequest
from services.executor.warmup import timed_step

MOST_CAUGHT_UP = 512
"""Tokens that the draft model computes before one step beside drafts, if the executor's own steps may have as
many: it catches up with a long text over several."""
LEFT_BEHIND = 1
"""Tokens that it is behind with when all its drafts were accepted: it never computed the last of them."""


class DraftProposer:
    """Its model computes nothing while nothing is to be drafted, and catches up when something is."""

    name = "draft"
    weighs_drafts = False

    def __init__(self, backend: Backend, cache: DraftCache, detail: str, step_tokens: int) -> None:
        """`step_tokens`: the most that a step of the executor computes."""
        self._backend, self._cache, self.detail = backend, cache, detail
        self._step_tokens = step_tokens

    def warm_up(self, shape: KvShape) -> float:
        return min(timed_step(self._backend, shape, 0, 1) for _ in range(3))

    def catch_up(self, requests: Sequence_[DraftRequest]) -> list[bool]:
        left = min(MOST_CAUGHT_UP, self._step_tokens)
        chains, ready = [], []
        for sequence, most in requests:
            # The last token is computed with the first draft, and so is what the last run of drafts left.
            computed, wanted = self._cache.computed(sequence), len(sequence.tokens) - 1
            if self._room(sequence, most) < 1 or wanted - computed <= LEFT_BEHIND:
                ready.append(True)
                continue
            end = min(wanted, computed + left)
            if end > computed:
                chains.append(Chain(sequence, computed, 0, end))
            left -= end - computed
            ready.append(end == wanted)
        self._extend(chains)
        return ready

    def propose(self, requests: Sequence_[DraftRequest], tables: BlockTables, tokens: int) -> list[list[int]]:
        chains = []
        for sequence, most in requests:
            room, size = max(0, self._room(sequence, most)), len(sequence.tokens)
            chains.append(Chain(sequence, self._cache.computed(sequence), room, size))
        self._extend([chain for chain in chains if chain.most and chain.computed < chain.end])
        return [chain.draft_ids for chain in chains]

    def computed(self, plain: int, tokens: int, seconds: float) -> None:
        """How many drafts pay is its scheduler's to say."""

    def _room(self, sequence: Sequence, most: int) -> int:
        """Drafts that may follow its tokens: none past this model's limit. The last one is not computed here."""
        slots = min(self._cache.slots(sequence), self._backend.spec.context_length)
        return min(most, slots - len(sequence.tokens) + 1)

    def _extend(self, chains: Sequence_[Chain]) -> None:
        extend(chains, self._backend.step, lambda some: self._cache.gather([chain.sequence for chain in some]))
        for chain in chains:
            self._cache.wrote(chain.sequence, chain.computed, chain.draft_ids)
