"""Block operations of plans: which are well-formed, when they are due, and what becomes of them. Pure.

Copies within the device's memory are made by the step thread, at once and in order. Moves to and from other places go
on beside the steps. They end in any order, and late: the epoch that asked may be over by then. A kvmanager that cannot
know whether an operation arrived sends it again; each is done once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quire.v1 import executor_pb2
from services.common.errors import QuireError, Reason
from services.executor.admission import GROUP
from services.executor.speculation.draft_cache import GROUP as DRAFT_GROUP
from services.executor.tiers.pools import NO_POOLS, TIERS, PoolMap, PoolSpec
from services.executor.tiers.store import KEY_BYTES, NO_KEY

Kind = executor_pb2.BlockOperationKind
COPY, OFFLOAD, LOAD, EXPORT, IMPORT = (
    executor_pb2.BLOCK_OPERATION_KIND_COPY,
    executor_pb2.BLOCK_OPERATION_KIND_OFFLOAD,
    executor_pb2.BLOCK_OPERATION_KIND_LOAD,
    executor_pb2.BLOCK_OPERATION_KIND_EXPORT,
    executor_pb2.BLOCK_OPERATION_KIND_IMPORT,
)
BEFORE, AFTER = executor_pb2.BLOCK_OPERATION_PHASE_BEFORE, executor_pb2.BLOCK_OPERATION_PHASE_AFTER
MOST_SEEN = 4096
"""Ids that are remembered: many times what a kvmanager has under way."""
REMOTE = "remote"
"""The tier that export and import reach."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Block copies of one phase, in order."""

    operation_ids: list[int]
    pairs: list[tuple[int, int]]
    draft_pairs: list[tuple[int, int]] = field(default_factory=list)  # of the draft model


@dataclass(frozen=True, slots=True)
class Move:
    """A block's content from one place to another; None is the remote store."""

    epoch: int
    operation_id: int
    kind: str  # "offload", "load", "export" or "import"
    tier: str  # the one below the device that takes part
    source: int | None
    destination: int | None
    key: bytes  # NO_KEY where the content has none

    @property
    def fills_device(self) -> bool:
        return self.kind in ("load", "import")


class Operations:
    """Operations that wait for their moment, and moves under way. Mutable; owned by the step thread."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[executor_pb2.BlockOperation]] = {BEFORE: [], AFTER: []}
        self._under_way: dict[int, Move] = {}
        self._seen: dict[int, None] = {}  # ids in the order of their arrival
        self._closing: list[int] = []
        self._holds = False
        self._first_id = 0

    def take(self, operations: Iterable[executor_pb2.BlockOperation]) -> None:
        """Takes well-formed operations in, but those that came before."""
        for operation in operations:
            if operation.operation_id not in self._seen:
                self._seen[operation.operation_id] = None
                self._waiting[operation.phase].append(operation)
        while len(self._seen) > MOST_SEEN:
            del self._seen[next(iter(self._seen))]

    def hold(self) -> None:
        """Begins no moves any more, until `resume`: the kvmanager is being told what there is."""
        self._holds = True

    def resume(self, first_id: int) -> None:
        """Goes on, without moves below `first_id`: they are of a kvmanager that is gone."""
        self._holds, self._first_id = False, first_id

    def copies(self, phase: int) -> Copies:
        """Copies due in this phase; the caller makes them, then calls `copied`."""
        due = [operation for operation in self._waiting[phase] if operation.kind == COPY]
        pairs: dict[int, list[tuple[int, int]]] = {GROUP: [], DRAFT_GROUP: []}
        for operation in due:
            pairs[operation.group_id].append((operation.source_block_id, operation.destination_block_id))
        return Copies([operation.operation_id for operation in due], pairs[GROUP], pairs[DRAFT_GROUP])

    def copied(self, copies: Copies) -> None:
        done = set(copies.operation_ids)
        for phase, waiting in self._waiting.items():
            self._waiting[phase] = [operation for operation in waiting if operation.operation_id not in done]

    def begin_moves(
        self, phase: int, epoch: int, pools: PoolMap, unsettled: Callable[[], set[int]], key_of: Callable[[int], bytes]
    ) -> list[Move]:
        """Moves of this phase whose source nobody writes any more; from now on they are under way.

        `unsettled` names the blocks that are still to be written.
        """
        if self._holds or all(operation.kind == COPY for operation in self._waiting[phase]):
            return []
        written = unsettled()
        begun: list[Move] = []
        left = []
        for operation in self._waiting[phase]:
            if operation.kind == COPY:
                left.append(operation)
            elif operation.operation_id < self._first_id:
                continue
            elif operation.kind != IMPORT and operation.source_block_id in written:
                left.append(operation)
            else:
                begun.append(_move(operation, epoch, pools, key_of))
        self._waiting[phase] = left
        self._under_way.update((move.operation_id, move) for move in begun)
        return begun

    def ended(self, move: Move) -> bool:
        """Takes the end of a move in. Whether it was under way."""
        return self._under_way.pop(move.operation_id, None) is not None

    @property
    def idle(self) -> bool:
        """Whether no move is under way."""
        return not self._under_way

    def drop(self) -> None:
        """Forgets what waits. What is under way goes on."""
        for waiting in self._waiting.values():
            waiting.clear()

    def close(self, epoch: int) -> None:
        """An epoch is over; `closed` says when nothing of it is under way any more."""
        self._closing.append(epoch)

    def closed(self) -> list[int]:
        """Takes out the epochs in which, as in all before them, nothing is under way. Ascending."""
        oldest = min((move.epoch for move in self._under_way.values()), default=None)
        closed = [epoch for epoch in self._closing if oldest is None or epoch < oldest]
        self._closing = self._closing[len(closed) :]
        return closed


def check_operation(operation: executor_pb2.BlockOperation, pools: PoolMap, draft_pools: PoolMap = NO_POOLS) -> None:
    """Raises PROTOCOL, or UNSUPPORTED for what there is no code for."""
    if operation.phase not in (BEFORE, AFTER):
        raise QuireError(Reason.PROTOCOL, "operations.phase: must be stated")
    if operation.group_id == DRAFT_GROUP and draft_pools.pools:
        if operation.kind != COPY:
            raise QuireError(Reason.UNSUPPORTED, "operations: blocks of a draft model are copied, nothing else")
        pools = draft_pools
    elif operation.group_id != GROUP:
        raise QuireError(Reason.PROTOCOL, "operations: no such cache group")
    if operation.peer:
        raise QuireError(Reason.UNSUPPORTED, "operations.peer: only the executor's own remote store is supported")
    kind = operation.kind
    if len(operation.key) not in ((KEY_BYTES,) if kind in (EXPORT, IMPORT) else (0, KEY_BYTES)):
        raise QuireError(Reason.PROTOCOL, f"operations.key: {KEY_BYTES} bytes")
    if kind not in (COPY, OFFLOAD, LOAD, EXPORT, IMPORT):
        raise QuireError(Reason.UNSUPPORTED, f"operations.kind: {Kind.Name(kind)} is not supported")
    if kind in (COPY, OFFLOAD, LOAD):
        source, destination = _pool(operation, "source", pools), _pool(operation, "destination", pools)
        if not _fits(kind, source, destination, pools.pools[0]):
            raise QuireError(
                Reason.PROTOCOL,
                f"operations: no {Kind.Name(kind)} from {source.format} blocks on {source.tier}"
                f" to {destination.format} blocks on {destination.tier}",
            )
    else:
        _pool(operation, "source" if kind == EXPORT else "destination", pools)


def _pool(operation: executor_pb2.BlockOperation, end: str, pools: PoolMap) -> PoolSpec:
    block_id, pool_id = getattr(operation, f"{end}_block_id"), getattr(operation, f"{end}_pool_id")
    pool = pools.find(block_id)
    if pool is None or pool_id not in (0, pool.pool_id):  # 0 is also what is not stated
        raise QuireError(Reason.PROTOCOL, f"operations.{end}: block {block_id} is in no pool, or in another one")
    return pool


def _fits(kind: int, source: PoolSpec, destination: PoolSpec, hot: PoolSpec) -> bool:
    if kind == COPY:
        return source == destination == hot  # steps may write copies
    falls = TIERS.index(destination.tier) - TIERS.index(source.tier)
    return source.format == destination.format and (falls > 0 if kind == OFFLOAD else falls < 0)


def _move(operation: executor_pb2.BlockOperation, epoch: int, pools: PoolMap, key_of: Callable[[int], bytes]) -> Move:
    kind = operation.kind
    source = operation.source_block_id if kind != IMPORT else None
    destination = operation.destination_block_id if kind != EXPORT else None
    key = operation.key or (NO_KEY if source is None else key_of(source))
    lower = pools.find(operation.destination_block_id if kind == OFFLOAD else operation.source_block_id)
    tier = REMOTE if kind in (EXPORT, IMPORT) or lower is None else lower.tier
    name = Kind.Name(kind).removeprefix("BLOCK_OPERATION_KIND_").lower()
    return Move(epoch, operation.operation_id, name, tier, source, destination, key)
