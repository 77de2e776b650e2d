"""Blocks on their way between tiers: what the kvmanager decided and no executor has reported yet."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from services.kvmanager.pools import Pool

ROOM_SHARE = 16
"""A pool with a lower tier keeps one part in this many free: what it holds and nobody uses moves down ahead of need."""
MOST_UNDER_WAY = 64
"""Moves of one executor at a time."""


class MoveKind(enum.IntEnum):
    """Values are those of the wire."""

    OFFLOAD = 3
    LOAD = 4


class Move(NamedTuple):
    """A copy from one pool to another. Both blocks are held until it is over."""

    operation_id: int
    kind: MoveKind
    epoch: int
    source: Pool
    source_block: int
    destination: Pool
    destination_block: int
    key: bytes


class Moves:
    """The moves of one executor: decided, handed out once, and over when it reports them or their epoch has ended."""

    def __init__(self, pools: Sequence[Pool], device: int, operation_ids: Iterator[int]) -> None:
        self._device = [pool for pool in pools if pool.spec.tier == device]
        self._lower = sorted((pool for pool in pools if pool.spec.tier != device), key=lambda pool: pool.spec.tier)
        self._ids = operation_ids
        self._under_way: dict[int, Move] = {}
        self._unsent: list[Move] = []

    def __iter__(self) -> Iterator[Move]:
        return iter(self._under_way.values())

    def lower_of(self, pool: Pool) -> list[Pool]:
        """Pools of lower tiers for a device pool's blocks, nearest first."""
        spec = pool.spec
        return [p for p in self._lower if (p.spec.group_id, p.spec.format) == (spec.group_id, spec.format)]

    def find_lower(self, pool: Pool, keys: Sequence[bytes]) -> list[tuple[Pool, int]]:
        """Where the leading run of these keys lies in lower tiers."""
        pools = self.lower_of(pool)
        found = []
        for key in keys:
            place = next(((p, block) for p in pools if (block := p.index.find(key)) is not None), None)
            if place is None:
                break
            found.append(place)
        return found

    def load(self, pool: Pool, keys: Sequence[bytes], found: Sequence[tuple[Pool, int]], epoch: int) -> list[Move]:
        """Begins to bring blocks up; those already on their way are joined. The caller has seen that there is room."""
        coming = {m.key: m for m in self._under_way.values() if m.kind == MoveKind.LOAD and m.destination is pool}
        moves = []
        for key, (source, block) in zip(keys, found, strict=True):
            move = coming.get(key)
            if move is None:
                source.acquire([block], 0)
                (destination,) = pool.acquire((), 1)
                move = self._begin(MoveKind.LOAD, epoch, source, block, pool, destination, key)
            moves.append(move)
        return moves

    def make_room(self, pool: Pool, epoch: int) -> None:
        """Begins to move down what would be evicted next, where little of the pool is free."""
        lower = self.lower_of(pool)
        if not lower:
            return
        leaving = sum(m.source is pool for m in self._under_way.values())
        wanted = pool.blocks.count // ROOM_SHARE - pool.blocks.free_count - leaving
        wanted = min(wanted, MOST_UNDER_WAY - len(self._under_way))
        if wanted <= 0:
            return
        for block in pool.oldest_cached(wanted):
            key = pool.index.key_of(block)
            assert key is not None
            if any(p.index.find(key) is not None for p in lower):
                pool.discard(block)  # it is there already
            elif lower[0].blocks.available_count:
                pool.acquire([block], 0)
                (destination,) = lower[0].acquire((), 1)
                self._begin(MoveKind.OFFLOAD, epoch, pool, block, lower[0], destination, key)

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
            self._end(move, move.operation_id not in failed)
        return over

    def abort(self, epoch: int) -> list[Move]:
        """Ends all moves of epochs up to this one: nothing writes in them any more, and nothing is known of them."""
        over = [move for move in self._under_way.values() if move.epoch <= epoch]
        self._unsent = [move for move in self._unsent if move.epoch > epoch]
        for move in over:
            del self._under_way[move.operation_id]
            self._end(move, False)
        return over

    def _begin(
        self, kind: MoveKind, epoch: int, source: Pool, block: int, destination: Pool, target: int, key: bytes
    ) -> Move:
        move = Move(next(self._ids), kind, epoch, source, block, destination, target, key)
        self._under_way[move.operation_id] = move
        self._unsent.append(move)
        return move

    def _end(self, move: Move, arrived: bool) -> None:
        keys = [move.key] if arrived else ()
        if arrived:
            move.destination.settle(move.destination_block, move.key)
        move.destination.release([move.destination_block], keys)
        move.source.release([move.source_block], [move.key])
        if arrived and move.kind == MoveKind.OFFLOAD:
            move.source.discard(move.source_block)
