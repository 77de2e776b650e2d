"""Plans' demotions as a kvmanager would send them, and what a step read compared with the policy."""

from __future__ import annotations

from collections.abc import Sequence

from quire.v1 import executor_pb2
from services.common.kv_policy import KvPolicy
from services.executor.admission import ModelLimits


class Ages:
    """Takes fresh blocks of colder pools, one after the other."""

    def __init__(self, limits: ModelLimits, policy: KvPolicy) -> None:
        self.limits, self.policy = limits, policy
        self._next = list(limits.pool_starts[:-1])

    def take(self, age: int) -> int:
        block_id = self._next[age]
        self._next[age] += 1
        assert block_id < self.limits.pool_starts[age + 1]
        return block_id

    def hot(self, tokens: int) -> list[int]:
        """Fresh hot blocks for so many tokens."""
        return [self.take(0) for _ in range(-(-tokens // self.limits.block_size))]

    def demotions(self, sequence_id: int, after: int, through: int) -> list[executor_pb2.BlockDemotion]:
        """All changes of a sequence at lengths in (after, through], every copy written."""
        changes = self.policy.changes(self.limits.block_size, after, through)
        return [demotion(sequence_id, length, [(position, self.take(age))]) for length, position, age in changes]

    def at_entry(self, sequence_id: int, computed: int) -> list[executor_pb2.BlockDemotion]:
        """What brings hot blocks to the ages that a sequence of `computed` tokens reads."""
        size = self.limits.block_size
        return [
            demotion(sequence_id, computed, [(position, self.take(age))])
            for position in range(computed // size)
            for age in range(1, self.policy.age(position, size, computed) + 1)
        ]

    def check(self, table: Sequence[int], first: int, end: int) -> None:
        """That tokens [first, end) read every block in the format that their own length prescribes."""
        size = self.limits.block_size
        found = [self.limits.pool_of(block_id) for block_id in table]
        for length in range(first, end):
            count = length // size + 1
            assert found[:count] == [self.policy.age(position, size, length) for position in range(count)], length


def demotion(
    sequence_id: int, at_length: int, changes: Sequence[tuple[int, int]], *, writes: bool = True
) -> executor_pb2.BlockDemotion:
    """`changes`: (position, block id)."""
    return executor_pb2.BlockDemotion(
        sequence_id=sequence_id,
        at_length=at_length,
        positions=[position for position, _ in changes],
        block_ids=[block_id for _, block_id in changes],
        writes=[writes] * len(changes),
    )
