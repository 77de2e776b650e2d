"""All that lies below the device: stores, their pools, and the threads that move blocks to and from them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from services.common.errors import QuireError, Reason
from services.common.sizes import format_size, parse_size
from services.executor.backends.base import Backend, KvShape
from services.executor.memory import measure
from services.executor.operations import REMOTE, Move
from services.executor.settings import ExecutorSettings
from services.executor.tiers.disk_store import DiskStore, slot_bytes
from services.executor.tiers.entry import identity_of
from services.executor.tiers.host_store import HostStore
from services.executor.tiers.metrics import TierMetrics
from services.executor.tiers.mover import Mover
from services.executor.tiers.pools import DISK, HOST, PoolMap, PoolSpec, device_pools, lower_pools
from services.executor.tiers.shelf import take_shelf
from services.executor.tiers.store import Outcome, RemoteStore, SlotStore, StoreError

log = logging.getLogger("quire.executor")

FILE_VERSION = "1"
REST = 3.0
"""Moves that nobody waits for take a quarter of a CPU at most where steps need them all."""


class LowerTiers:
    """Makes moves, those of the remote store on a thread of their own: it may keep one waiting."""

    def __init__(
        self,
        backend: Backend,
        pools: PoolMap,
        stores: Mapping[int, SlotStore],
        remote: RemoteStore | None,
        closing: ExitStack,
    ) -> None:
        """`stores` by pool id. `closing` holds what to let go of at the end."""
        self.pools = pools
        self._backend, self._stores, self._remote, self._closing = backend, stores, remote, closing
        self._metrics: TierMetrics | None = None
        self._on_made: Callable[[int, float], None] = lambda byte_count, seconds: None
        self._movers: dict[bool, Mover] = {}

    @property
    def remote_name(self) -> str:
        """Of the remote store, "" for none."""
        return self._remote.name if self._remote is not None else ""

    def found(self) -> Iterator[tuple[int, bytes]]:
        """Block ids and keys of what an earlier process left."""
        for pool in self.pools.lower:
            for slot, key in self._stores[pool.pool_id].found().items():
                yield pool.first + slot, key

    def start(
        self,
        metrics: TierMetrics,
        on_ended: Callable[[Move, Outcome], None],
        on_made: Callable[[int, float], None],
    ) -> None:
        """`on_ended` hears of each move once, `on_made` of the bytes and seconds of those made; on any thread."""
        self._metrics, self._on_made = metrics, on_made

        def ended(move: Move, outcome: Outcome) -> None:
            metrics.ended(move.tier, move.kind, outcome.value)
            on_ended(move, outcome)

        # Steps on CPUs take all of them, and wait at every barrier for the thread that a move keeps from its own.
        rest = REST if self._backend.computes_from_host_memory else 0
        self._movers = {
            is_remote: Mover("kv-remote" if is_remote else "kv-tiers", self._make, ended, rest)
            for is_remote in (False, True)
        }

    def submit(self, move: Move) -> None:
        self._movers[move.tier == REMOTE].submit(move)

    def drop(self) -> None:
        """Ends all moves that have not begun."""
        for mover in self._movers.values():
            mover.drop()

    def close(self) -> None:
        """As drop; returns once nothing is written any more, with all files closed."""
        for mover in self._movers.values():
            mover.stop()
        self._closing.close()

    def _make(self, move: Move) -> Outcome:
        started = time.perf_counter()
        try:
            block = self._read(move)
            self._write(move, block)
        except StoreError as error:
            log.debug("a KV block was not moved", extra={"kind": move.kind, "tier": move.tier, "why": str(error)})
            return error.outcome
        seconds = time.perf_counter() - started
        if self._metrics is not None:
            self._metrics.made(move.tier, move.kind, len(block), seconds)
        if move.tier != REMOTE:
            self._on_made(len(block), seconds)
        return Outcome.DONE

    def _read(self, move: Move) -> memoryview:
        if move.source is None:
            pool = self._pool(move.destination)
            return self._remote_store().get(pool.format, move.key, pool.block_bytes)
        pool = self._pool(move.source)
        store = self._stores.get(pool.pool_id)
        return (
            self._backend.read_block(move.source) if store is None else store.read(move.source - pool.first, move.key)
        )

    def _write(self, move: Move, block: memoryview) -> None:
        if move.destination is None:
            self._remote_store().put(self._pool(move.source).format, move.key, block)
            return
        pool = self._pool(move.destination)
        store = self._stores.get(pool.pool_id)
        if store is None:
            self._backend.write_block(move.destination, block)
        else:
            store.write(move.destination - pool.first, move.key, block)

    def _pool(self, block_id: int | None) -> PoolSpec:
        pool = self.pools.find(block_id) if block_id is not None else None
        if pool is None:
            raise RuntimeError(f"block {block_id} is in no pool")
        return pool

    def _remote_store(self) -> RemoteStore:
        if self._remote is None:
            raise StoreError(Outcome.UNREACHABLE, "there is no remote store")
        return self._remote


def open_tiers(settings: ExecutorSettings, backend: Backend, shape: KvShape, fingerprint: str) -> LowerTiers | None:
    """The tiers that the settings ask for, None for none. Raises MODEL_LOAD_FAILED, naming the setting at fault."""
    if settings.kv_host_memory is None and settings.kv_disk is None and settings.kv_remote is None:
        return None
    if settings.kv_policy.colder:
        log.warning("lower tiers stay empty: KV with formats by age does not move there yet")
    pools = device_pools(shape, backend.kv_format)
    stores: dict[int, SlotStore] = {}
    remote: RemoteStore | None = None
    with ExitStack() as closing:
        if settings.kv_host_memory is not None:
            added = _host_pools(pools, parse_size(settings.kv_host_memory), backend)
            for pool in added:
                stores[pool.pool_id] = HostStore(pool.block_bytes, pool.count, backend.host_memory)
            pools += added
        if settings.kv_disk is not None:
            size = parse_size(settings.kv_disk_size)
            added = _disk_pools(pools, size)
            made_by = (FILE_VERSION, fingerprint, str(settings.kv_policy), str(shape.block_size))
            _open_files(settings.kv_disk, size, added, made_by, stores, closing)
            pools += added
        if settings.kv_remote is not None:
            remote = _open_remote(settings.kv_remote.get_secret_value(), fingerprint)
            closing.callback(remote.close)
        for pool in pools:
            if pool.pool_id in stores:
                log.info(
                    "KV tier",
                    extra={
                        "tier": pool.tier,
                        "format": pool.format,
                        "blocks": pool.count,
                        "found": len(stores[pool.pool_id].found()),
                    },
                )
        return LowerTiers(backend, PoolMap(pools), stores, remote, closing.pop_all())


def _host_pools(above: list[PoolSpec], memory: int, backend: Backend) -> list[PoolSpec]:
    if backend.computes_from_host_memory:
        raise _failed(
            "kv_host_memory", f"the {backend.name} backend computes from host memory: give it kv_memory instead"
        )
    available = measure().available
    if memory > available:
        raise _failed("kv_host_memory", f"{format_size(memory)} were asked for, {format_size(available)} are free")
    try:
        return lower_pools(above, HOST, memory)
    except ValueError as error:
        raise _failed("kv_host_memory", str(error)) from error


def _disk_pools(above: list[PoolSpec], size: int) -> list[PoolSpec]:
    try:
        return lower_pools(above, DISK, size, slot_bytes)
    except ValueError as error:
        raise _failed("kv_disk_size", str(error)) from error


def _open_files(
    folder: Path,
    size: int,
    pools: list[PoolSpec],
    made_by: tuple[str, ...],
    stores: dict[int, SlotStore],
    closing: ExitStack,
) -> None:
    """One file for each pool, on a shelf of this executor's own. `made_by`: what content depends on beside its key."""
    blocks = [f"{pool.format} {pool.block_bytes}" for pool in pools]
    try:
        shelf = take_shelf(folder, identity_of(*made_by, *blocks).hex())
        closing.callback(shelf.close)
        state = os.statvfs(shelf.path)
        if (whole := state.f_blocks * state.f_frsize) < size:
            raise _failed("kv_disk_size", f"{format_size(size)} are more than the disk's {format_size(whole)}")
        for pool, block in zip(pools, blocks, strict=True):
            identity = identity_of(*made_by, block)
            store = DiskStore(shelf.path / f"{pool.format}.kv", identity, pool.block_bytes, pool.count)
            closing.callback(store.close)
            stores[pool.pool_id] = store
        held = sum(file.stat().st_blocks * 512 for file in shelf.path.iterdir())
    except OSError as error:
        raise _failed("kv_disk", f"{folder}: {error.strerror}") from error
    if (room := state.f_bavail * state.f_frsize + held) < size:
        log.warning(
            "the disk has less room than kv_disk_size; KV that finds none is not kept",
            extra={"folder": str(folder), "room": format_size(room), "asked": format_size(size)},
        )


def _open_remote(url: str, fingerprint: str) -> RemoteStore:
    from services.executor.tiers.redis_store import RedisStore  # its import takes a while

    try:
        return RedisStore(url, fingerprint)
    except ValueError as error:
        raise _failed("kv_remote", str(error)) from error


def _failed(setting: str, message: str) -> QuireError:
    return QuireError(Reason.MODEL_LOAD_FAILED, f"{setting}: {message}")
