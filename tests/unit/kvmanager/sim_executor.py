"""An executor and a scheduler in a few lines each, between which messages wait, get lost and come twice.

The executor's memory is real in one respect: each block holds the tokens that it was computed from and its age. So a
block that was given away too early, a copy of the wrong block or a wrong age is seen by whoever reads it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.common.kv_policy import KvPolicy
from services.kvmanager.executors import ExecutorSpec, InventoryBlock
from services.kvmanager.keys import KeySpace
from services.kvmanager.moves import Move
from services.kvmanager.pools import PoolSpec
from services.kvmanager.reservations import Demoted, GroupBlocks, Restated
from tests.unit.kvmanager.helpers import MODEL

SIZE = 32
FORMATS = {"int8": 5, "int4": 6}
HOT, DISK = 2, 3


def spec(name: str, policy: KvPolicy, counts: Sequence[int], disk: int = 0, store: str = "") -> ExecutorSpec:
    """Device pools of so many blocks by age, and one of hot blocks on a disk."""
    formats = [HOT, *(FORMATS[colder.format] for colder in policy.colder)]
    pools, first = [], 0
    for number, (format_, count) in enumerate(zip(formats, counts, strict=True)):
        pools.append(PoolSpec(number, 0, 1, format_, (), count, first, SIZE))
        first += count
    if disk:
        pools.append(PoolSpec(len(pools), 0, DISK, HOT, (), disk, first, SIZE))
    return ExecutorSpec(name, MODEL, tuple(pools), policy, store)


class Content(NamedTuple):
    """What is in a block: the packed tokens up to its end, and its age."""

    prefix: bytes
    age: int


@dataclass(eq=False)
class Running:
    """A sequence as the executor has it."""

    tokens: array[int]
    computed: int
    table: list[int]
    changes: deque[tuple[int, int, int, bool]] = field(default_factory=deque)  # length, position, block id, writes


@dataclass
class Plan:
    """What a scheduler tells an executor at once."""

    enter: tuple[int, Running] | None = None
    append: tuple[int, list[int]] | None = None
    demotions: Sequence[tuple[int, Sequence[Demoted]]] = ()
    ended: int = 0
    operations: Sequence[Move] = ()
    sealed: Sequence[InventoryBlock] = ()


class SimExecutor:
    """Computes whatever it has blocks for. What it reads is checked against what it must be."""

    def __init__(self, made: ExecutorSpec) -> None:
        self.spec = made
        self.epoch = 1
        self.closed: list[int] = []
        self.memory: dict[int, Content | None] = {}
        self.inventory: dict[int, bytes] = {}
        self.running: dict[int, Running] = {}
        self.plans: deque[Plan] = deque()
        self.waiting: dict[int, Move] = {}  # operations
        self.seen: set[int] = set()
        self.ended: dict[int, bool] = {}  # operations, and whether they were done
        self.unsent: list[int] = []

    def new_epoch(self) -> None:
        self.closed.append(self.epoch)
        self.epoch += 1
        self.running.clear()
        self.plans.clear()
        self.waiting.clear()

    def knows(self, sequence_id: int) -> bool:
        """Whether it may still compute that sequence."""
        return sequence_id in self.running or any(p.enter and p.enter[0] == sequence_id for p in self.plans)

    def take_plan(self) -> None:
        plan = self.plans.popleft()
        self.running.pop(plan.ended, None)
        for move in plan.operations:
            if move.operation_id not in self.seen:
                self.seen.add(move.operation_id)
                self.waiting[move.operation_id] = move
        for block in plan.sealed:
            self.inventory[block.block_id] = block.key
        if plan.append is not None and plan.append[0] in self.running:
            self.running[plan.append[0]].table += plan.append[1]
        if plan.enter is not None:
            self.running[plan.enter[0]] = plan.enter[1]
        for sequence_id, demotions in plan.demotions:
            if sequence_id in self.running:
                for change in demotions:
                    assert change.length >= self.running[sequence_id].computed, "a change comes too late"
                    for one in zip(change.positions, change.block_ids, change.writes, strict=True):
                        self.running[sequence_id].changes.append((change.length, *one))

    def compute(self, sequence_id: int, steps: int) -> None:
        """Up to so many tokens, one period at a time."""
        held = self.running[sequence_id]
        while steps > 0:
            while held.changes and held.changes[0][0] == held.computed:
                _, position, block_id, writes = held.changes.popleft()
                source = self.memory[held.table[position]]
                assert source is not None
                age = self.age_of(block_id)
                if writes:
                    assert age == source.age + 1, "a copy that skips an age"
                    self.write(block_id, Content(source.prefix, age))
                held.table[position] = block_id
            until = held.changes[0][0] - held.computed if held.changes else steps
            count = min(steps, until, len(held.table) * SIZE - held.computed, 128 - held.computed % 128)
            if count <= 0:
                return
            self.check(held)
            while len(held.tokens) <= held.computed + count:
                held.tokens.append(0)
            for position in range(held.computed // SIZE, -(-(held.computed + count) // SIZE)):
                end = (position + 1) * SIZE
                full = end <= held.computed + count
                assert self.age_of(held.table[position]) == 0
                self.write(held.table[position], Content(held.tokens[:end].tobytes(), 0) if full else None)
            held.computed += count
            steps -= count

    def check(self, held: Running) -> None:
        """Every full block holds what was computed from these very tokens, in the age that this length prescribes."""
        for position in range(held.computed // SIZE):
            prefix = held.tokens[: (position + 1) * SIZE].tobytes()
            age = self.spec.policy.age(position, SIZE, held.computed)
            found = self.memory.get(held.table[position])
            assert found == Content(prefix, age), f"position {position} of {held.computed} tokens"

    def move(self, operation_id: int, *, well: bool) -> None:
        """Does an operation, well or not."""
        move = self.waiting.pop(operation_id)
        assert move.source is not None
        assert move.destination is not None
        source, destination = (spot.pool.spec.first_block_id + spot.block for spot in (move.source, move.destination))
        if well:
            self.write(destination, self.memory.get(source))
            self.inventory[destination] = move.key
        else:
            self.write(destination, None)
        self.ended[operation_id] = well
        self.unsent.append(operation_id)

    def write(self, block_id: int, content: Content | None) -> None:
        self.memory[block_id] = content
        self.inventory.pop(block_id, None)

    def age_of(self, block_id: int) -> int:
        return next(
            p.pool_id for p in self.spec.pools if p.tier == 1 and 0 <= block_id - p.first_block_id < p.block_count
        )

    def inventory_blocks(self) -> list[InventoryBlock]:
        return [InventoryBlock(0, block, key) for block, key in self.inventory.items()]


@dataclass(eq=False)
class Stay:
    """A sequence as its scheduler knows it."""

    executor: SimExecutor
    epoch: int
    namespace: str
    blocks: list[int]
    demotions: list[Demoted]
    tokens: array[int]
    computed: int
    reported: int  # tokens that the kvmanager knows
    leaving: bool = False

    def restated(self, sequence_id: int, key_space: KeySpace) -> Restated:
        self.reported = len(self.tokens)
        return Restated(
            sequence_id,
            self.executor.spec.executor_id,
            self.epoch,
            key_space,
            self.tokens[:],
            self.computed,
            [GroupBlocks(0, list(self.blocks))],
            list(self.demotions),
        )
