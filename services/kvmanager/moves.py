"""Blocks on their way between tiers: what the kvmanager decided and no executor has reported yet."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from services.kvmanager.pools import Pool
from services.kvmanager.remote import RemoteContent

ROOM_SHARE, LEAST_ROOM, MOST_ROOM_SHARE = 16, 16, 4
"""A pool with a lower tier keeps one part in 16 of its blocks free, or 16 blocks where that is more, but no more than a
quarter of them: what it holds and nobody uses moves down ahead of need."""
MOST_UNDER_WAY = 64
"""Moves of one executor at a time."""


class MoveKind(enum.IntEnum):
    """Values are those of the wire."""

    OFFLOAD = 3
    LOAD = 4
    EXPORT = 5
    IMPORT = 6

    @property
    def brings_up(self) -> bool:
        return self in (MoveKind.LOAD, MoveKind.IMPORT)


class Spot(NamedTuple):
    """A block of a pool."""

    pool: Pool
    block: int


class Move(NamedTuple):
    """A copy of a block from one place to another; None is the remote store. Both are held until it is over."""

    operation_id: int
    kind: MoveKind
    epoch: int
    source: Spot | None
    destination: Spot | None
    key: bytes

    @property
    def spots(self) -> list[Spot]:
        """The blocks that it holds."""
        return [spot for spot in (self.source, self.destination) if spot is not None]


class Moves:
    """The moves of one executor: decided, handed out once, and over when it reports them or their epoch has ended."""

    def __init__(
        self, pools: Sequence[Pool], device: int, operation_ids: Iterator[int], remote: RemoteContent | None
    ) -> None:
        """`device` is the tier that sequences compute from; `remote` the store that the executor reaches, if any."""
        self._lower = sorted((pool for pool in pools if pool.spec.tier != device), key=lambda pool: pool.spec.tier)
        self._ids = operation_ids
        self._remote = remote
        self._under_way: dict[int, Move] = {}
        self._unsent: list[Move] = []
        self._freed = False  # blocks came free

    def __iter__(self) -> Iterator[Move]:
        return iter(self._under_way.values())

    def find_below(self, pool: Pool, keys: Sequence[bytes]) -> list[Spot | None]:
        """Where the leading run of these keys lies below the device; None is the remote store."""
        pools, remote = self._lower_of(pool), self._remote
        found: list[Spot | None] = []
        for key in keys:
            spot = _find(pools, key)
            if spot is None and (remote is None or key not in remote):
                break
            found.append(spot)
        return found

    def bring_up(self, pool: Pool, keys: Sequence[bytes], found: Sequence[Spot | None], epoch: int) -> list[Move]:
        """Begins to bring blocks up; those already on their way are joined. The caller has seen that there is room."""
        coming = {
            move.key: move
            for move in self._under_way.values()
            if move.kind.brings_up and move.destination is not None and move.destination.pool is pool
        }
        moves = []
        for key, source in zip(keys, found, strict=True):
            move = coming.get(key)
            if move is None:
                if source is not None:
                    source.pool.acquire([source.block], 0)
                destination = Spot(pool, pool.acquire((), 1, None)[0])
                kind = MoveKind.IMPORT if source is None else MoveKind.LOAD
                move = self._begin(kind, epoch, source, destination, key)
            moves.append(move)
        return moves

    def make_room(self, pool: Pool, epoch: int) -> None:
        """Begins to copy down what would be evicted next, where little of the pool is free."""
        lower, remote = self._lower_of(pool), self._remote
        if not lower and remote is None:
            return
        leaving = sum(move.source is not None and move.source.pool is pool for move in self._under_way.values())
        count = pool.blocks.count
        room = min(max(count // ROOM_SHARE, LEAST_ROOM), count // MOST_ROOM_SHARE)
        wanted = room - pool.blocks.free_count - leaving
        wanted = min(wanted, MOST_UNDER_WAY - len(self._under_way))
        if wanted <= 0:
            return
        for block in pool.oldest_cached(wanted):
            key = pool.index.key_of(block)
            assert key is not None
            if remote is not None and key not in remote:
                pool.acquire([block], 0, None)
                self._begin(MoveKind.EXPORT, epoch, Spot(pool, block), None, key)
            if not lower and remote is not None and key in remote:
                pool.discard(block)
            elif lower:
                self._send_down(pool, lower, block, key, epoch)

    def send_down(self, pool: Pool, blocks: Iterable[int], epoch: int) -> None:
        """Begins to copy down all of these that have content and no holder: they make room, and are wanted back soon.

        Does nothing where no lower tier belongs to the executor itself.
        """
        if lower := self._lower_of(pool):
            for block in blocks:
                if pool.blocks.is_idle(block) and (key := pool.index.key_of(block)) is not None:
                    self._send_down(pool, lower, block, key, epoch)

    @property
    def coming_count(self) -> int:
        """Device blocks that come free once what is under way has left them, unless others hold them by then."""
        return sum(not move.kind.brings_up for move in self._under_way.values())

    def take_freed(self) -> bool:
        """Whether moves that ended left blocks free; each end counts once."""
        freed, self._freed = self._freed, False
        return freed

    def take_unsent(self) -> list[Move]:
        """What the executor is to be told; each once."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def send_again(self) -> None:
        """What was handed out may not have arrived: all that is under way is handed out once more."""
        self._unsent = list(self._under_way.values())

    def finish(self, operation_ids: Iterable[int], failed_ids: Iterable[int]) -> list[Move]:
        """Takes in what the executor reports. Late or repeated ids change nothing. Returns the moves that are over."""
        failed = set(failed_ids)
        over = [move for i in operation_ids if (move := self._under_way.pop(i, None)) is not None]
        for move in over:
            if move.operation_id in failed:
                self._fail(move)
            else:
                self._arrive(move)
            self._freed = self._freed or not move.kind.brings_up
        return over

    def abort(self, epoch: int) -> list[Move]:
        """Ends all moves of epochs up to this one: nothing writes in them any more, and nothing is known of them."""
        over = [move for move in self._under_way.values() if move.epoch <= epoch]
        self._unsent = [move for move in self._unsent if move.epoch > epoch]
        for move in over:
            del self._under_way[move.operation_id]
            _let_go(move, arrived=False)
        return over

    def _lower_of(self, pool: Pool) -> list[Pool]:
        """Pools of lower tiers for a device pool's blocks, nearest first."""
        spec = pool.spec
        return [p for p in self._lower if (p.spec.group_id, p.spec.format) == (spec.group_id, spec.format)]

    def _send_down(self, pool: Pool, lower: Sequence[Pool], block: int, key: bytes, epoch: int) -> None:
        """Copies an idle block down, or drops it where it is there already; one that is being copied is not idle."""
        if _find(lower, key) is not None:
            pool.discard(block)
        elif lower[0].blocks.available_count:
            pool.acquire([block], 0, None)
            destination = Spot(lower[0], lower[0].acquire((), 1, None)[0])
            self._begin(MoveKind.OFFLOAD, epoch, Spot(pool, block), destination, key)

    def _begin(self, kind: MoveKind, epoch: int, source: Spot | None, destination: Spot | None, key: bytes) -> Move:
        move = Move(next(self._ids), kind, epoch, source, destination, key)
        self._under_way[move.operation_id] = move
        self._unsent.append(move)
        return move

    def _arrive(self, move: Move) -> None:
        if move.destination is not None:
            move.destination.pool.settle(move.destination.block, move.key)
        _let_go(move, arrived=True)
        if move.kind == MoveKind.OFFLOAD and move.source is not None:
            move.source.pool.discard(move.source.block)
        if self._remote is not None and (move.source is None or move.destination is None):
            self._remote.stored(move.key)

    def _fail(self, move: Move) -> None:
        """What could not be brought up is not there: else it would be asked for again and again."""
        _let_go(move, arrived=False)
        if move.kind == MoveKind.LOAD and move.source is not None:
            move.source.pool.discard(move.source.block)
        if self._remote is not None and move.kind == MoveKind.IMPORT:
            self._remote.missing(move.key)


def _find(pools: Iterable[Pool], key: bytes) -> Spot | None:
    return next((Spot(pool, block) for pool in pools if (block := pool.index.find(key)) is not None), None)


def _let_go(move: Move, *, arrived: bool) -> None:
    if move.destination is not None:
        move.destination.pool.release([move.destination.block], [move.key] if arrived else ())
    if move.source is not None:
        move.source.pool.release([move.source.block], [move.key])
