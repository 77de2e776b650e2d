"""The block table of a text's window, in the KV formats that the model's policy prescribes at each length."""

from __future__ import annotations

from collections.abc import Iterator

from services.common.kv_policy import PERIOD
from services.executor.eval.windows import pieces
from services.executor.loader import LoadedModel


class AgedTable:
    """One sequence's blocks. Every pool of the model has one for each position."""

    def __init__(self, model: LoadedModel, length: int) -> None:
        """For `length` tokens; none has KV yet."""
        self._model = model
        self._length = 0
        self.block_ids = list(range(-(-length // model.shape.block_size)))

    def reach(self, length: int) -> None:
        """Makes the changes that are due where `length` tokens have KV."""
        shape, pairs = self._model.shape, []
        for change in self._model.policy.changes(shape.block_size, self._length, length):
            block_id = shape.pool_starts[change.age] + change.position
            pairs.append((self.block_ids[change.position], block_id))
            self.block_ids[change.position] = block_id
        self._length = length
        if pairs:
            self._model.backend.demote_blocks(pairs)


def pieces_between_changes(model: LoadedModel, start: int, stop: int, most: int) -> Iterator[range]:
    """[start, stop) in consecutive ranges of at most `most`, none of them across a change of the table."""
    if not model.policy.colder:
        yield from pieces(start, stop, most)
        return
    while start < stop:
        end = min(start + most, start // PERIOD * PERIOD + PERIOD, stop)
        yield range(start, end)
        start = end
