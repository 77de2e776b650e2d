"""A sequence's stay on an executor as it was granted: kept so that it can be stated to the kvmanager again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.v1 import executor_pb2, kvmanager_pb2

if TYPE_CHECKING:
    from services.scheduler.state import Executor


@dataclass(slots=True, eq=False)
class Stay:
    """Blocks of one sequence, and the changes of its block tables. Its id is used once."""

    sequence_id: int
    executor_id: str
    epoch: int
    model_fingerprint: str
    namespace: str
    kv_policy: str
    blocks: dict[int, list[int]] = field(default_factory=dict)  # by cache group, as granted
    demotions: list[executor_pb2.BlockDemotion] = field(default_factory=list)
    boundaries: deque[int] = field(default_factory=deque)  # lengths that no step may cross, ascending

    def add(self, blocks: Iterable[executor_pb2.BlockList], demotions: Sequence[executor_pb2.BlockDemotion]) -> None:
        """Takes in what a reservation or an extension granted."""
        for granted in blocks:
            self.blocks.setdefault(granted.group_id, []).extend(granted.block_ids)
        self.demotions += demotions
        for demotion in demotions:
            if not self.boundaries or demotion.at_length > self.boundaries[-1]:
                self.boundaries.append(demotion.at_length)

    def room(self, length: int) -> int | None:
        """Tokens that a step may compute beyond `length`, which never runs back; None for any number."""
        while self.boundaries and self.boundaries[0] <= length:
            self.boundaries.popleft()
        return self.boundaries[0] - length if self.boundaries else None

    def changes_between(self, start: int, stop: int) -> bool:
        """Whether blocks change as the sequence grows from `start` to `stop` tokens: those before them come free."""
        return any(start <= demotion.at_length < stop for demotion in self.demotions)

    def block_lists(self) -> list[executor_pb2.BlockList]:
        """The blocks as the wire has them."""
        return [executor_pb2.BlockList(group_id=group, block_ids=ids) for group, ids in self.blocks.items()]

    def held(self, token_ids: Sequence[int], computed_length: int) -> kvmanager_pb2.HeldSequence:
        """What the kvmanager must know of it."""
        return kvmanager_pb2.HeldSequence(
            sequence_id=self.sequence_id,
            executor_id=self.executor_id,
            blocks=self.block_lists(),
            epoch=self.epoch,
            model_fingerprint=self.model_fingerprint,
            namespace=self.namespace,
            kv_policy=self.kv_policy,
            token_ids=token_ids,
            computed_length=computed_length,
            demotions=self.demotions,
        )


@dataclass(frozen=True, slots=True)
class Origin:
    """The KV that a new sequence begins with. A hint: where it is gone, the sequence is computed like any other."""

    executor: Executor
    sequence_id: int  # the stay that holds it
    length: int  # leading tokens


@dataclass(slots=True, eq=False)
class Leaving:
    """A stay that is over for the scheduler; its blocks wait for the executor's answer to the plan that ends it."""

    stay: Stay
    plan: int
    token_ids: list[int]
    computed_length: int
    returns: bool = False  # preempted: its content is worth a place in a lower tier
