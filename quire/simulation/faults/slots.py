"""KV that holds token ids instead of numbers: a wrong block, or one that is reused too early, changes the answer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from quire.simulation.faults.truth import next_token
from services.executor.backends.base import Sampled, StepInputs, StepOutputs
from services.executor.sampling.draw import single_rows

NOTHING = -1


class Slots:
    """What a backend is to the executor's core. Block ids count through all pools, lower tiers included."""

    def __init__(self, block_count: int, block_size: int) -> None:
        self._size = block_size
        self._blocks = [[NOTHING] * block_size for _ in range(block_count)]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, destination in pairs:
            self._blocks[destination] = self._blocks[source][:]

    def step(self, inputs: StepInputs) -> StepOutputs:
        """Writes the new tokens, then draws each sequence's next one from what its blocks really hold."""
        size, blocks = self._size, self._blocks
        tables, tokens = inputs.block_tables.tolist(), inputs.token_ids.tolist()
        positions, ends = inputs.positions.tolist(), inputs.query_starts.tolist()
        for row, table in enumerate(tables):
            for index in range(ends[row], ends[row + 1]):
                position = positions[index]
                blocks[table[position // size]][position % size] = tokens[index]
        sampled: list[Sampled | None] = []
        for sample in single_rows(inputs.samples):
            row = bisect_right(ends, sample.row) - 1
            length = positions[sample.row] + 1
            context: list[int] = []
            for block in tables[row][: -(-length // size)]:
                context += blocks[block]
            sampled.append(Sampled(next_token(context[:length], sample.rule.seed, sample.rule.choice), None))
        return StepOutputs(sampled, [])
