"""Drafts of the target's own first layers, with its own head (as Elhoushi et al. 2024, LayerSkip).

Their keys and values are those of the target: a draft leaves nothing that the check of it would not write itself.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_

from services.executor.backends.base import Backend, KvShape
from services.executor.batch import BlockTables
from services.executor.speculation.chain import Chain, extend
from services.executor.speculation.proposer import DraftRequest
from services.executor.warmup import timed_step

SHARE = 4
"""Unless told otherwise, one part in this many of the layers drafts."""


class EarlyExitProposer:
    """Runs `layers` of the backend's layers."""

    name = "early_exit"
    weighs_drafts = False

    def __init__(self, backend: Backend, layers: int | None) -> None:
        """Raises ValueError where the model has no layer beyond these."""
        count = backend.spec.layer_count
        self.layers = layers or max(1, count // SHARE)
        if self.layers >= count:
            raise ValueError(f"early-exit: the model has {count} layers; fewer must draft, not {self.layers}")
        self._backend = backend
        self.detail = f"{self.layers} of {count} layers"

    def warm_up(self, shape: KvShape) -> float:
        return min(timed_step(self._backend, shape, 0, 1, layers=self.layers) for _ in range(3))

    def catch_up(self, requests: Sequence_[DraftRequest]) -> list[bool]:
        """Is never behind: it has what the target has."""
        return [True] * len(requests)

    def propose(self, requests: Sequence_[DraftRequest], tables: BlockTables, tokens: int) -> list[list[int]]:
        chains = [Chain(sequence, sequence.computed, most, len(sequence.tokens)) for sequence, most in requests]
        extend(
            chains,
            self._backend.step,
            lambda some: tables.gather([chain.sequence.table for chain in some]),
            self.layers,
        )
        return [chain.draft_ids for chain in chains]

    def computed(self, plain: int, tokens: int, seconds: float) -> None:
        """How many drafts pay is its scheduler's to say."""
