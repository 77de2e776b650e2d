"""Drafts drawn one after the other by a model that is cheaper than the target.

They are drawn by the rule of the request and with the noise of the output position, as the target draws: where both
find the same tokens likely, they draw the same one (a Gumbel coupling; Daliri et al. 2025).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field

import numpy as np

from services.executor.backends.base import Int32, StepInputs, StepOutputs
from services.executor.sequences import Sequence


@dataclass(slots=True)
class Chain:
    """One sequence's drafts."""

    sequence: Sequence
    computed: int  # tokens that the drafting model has KV of; fewer than there are
    most: int  # drafts wanted; with none, tokens are computed and nothing is drawn
    end: int = 0  # of the tokens to compute
    draft_ids: list[int] = field(default_factory=list)

    @property
    def uncomputed(self) -> list[int]:
        """Tokens and drafts without KV."""
        tokens = self.sequence.tokens
        known: list[int] = tokens[self.computed : self.end].tolist()
        return known + self.draft_ids[max(0, self.computed - len(tokens)) :]


def extend(
    chains: Sequence_[Chain],
    step: Callable[[StepInputs], StepOutputs],
    gather: Callable[[Sequence_[Chain]], Int32],
    layers: int = 0,
) -> None:
    """Draws all drafts wanted. `gather`: block tables of some chains [n, blocks]. A draft that cannot be drawn ends its
    chain.
    """
    active = list(chains)
    while active:
        inputs, drawing = _inputs(active, gather(active), layers)
        sampled = step(inputs).sampled
        for chain in active:
            chain.computed = chain.end + len(chain.draft_ids)
        active = []
        for chain, drawn in zip(drawing, sampled, strict=True):
            if drawn is not None:
                chain.draft_ids.append(drawn.token_id)
                if len(chain.draft_ids) < chain.most:
                    active.append(chain)


def _inputs(chains: Sequence_[Chain], tables: Int32, layers: int) -> tuple[StepInputs, list[Chain]]:
    """A step over what the chains have not computed, and those that draw."""
    token_ids: list[int] = []
    starts, samples, drawing = [0], [], []
    for chain in chains:
        token_ids += chain.uncomputed
        starts.append(len(token_ids))
        if chain.most:
            row = chain.sequence.sample_row
            row.row, row.draft_ids, row.first_place = len(token_ids) - 1, chain.draft_ids, len(chain.draft_ids)
            samples.append(row)
            drawing.append(chain)
    query_starts = np.array(starts, np.int32)
    counts = np.diff(query_starts)
    computed = np.array([chain.computed for chain in chains], np.int32)
    positions = np.arange(len(token_ids), dtype=np.int32) + np.repeat(computed - query_starts[:-1], counts)
    inputs = StepInputs(
        token_ids=np.array(token_ids, np.int32),
        positions=positions,
        query_starts=query_starts,
        context_lengths=computed + counts,
        block_tables=tables,
        samples=samples,
        layers=layers,
    )
    return inputs, drawing
