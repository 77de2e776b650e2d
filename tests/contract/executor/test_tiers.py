"""Moves of blocks over the wire: plans ask for them, steps go on, the kvmanager hears how they ended."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from quire.v1 import executor_pb2, types_pb2
from services.executor.settings import ExecutorSettings
from services.executor.tiers.lower_tiers import open_tiers
from tests.contract.executor.conftest import Executor, eventually, run
from tests.unit.executor.fake_backend import generate, loaded
from tests.unit.executor.plans import state, tokens_by_sequence

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
BEFORE = executor_pb2.BLOCK_OPERATION_PHASE_BEFORE
OFFLOAD, LOAD, IMPORT = (
    executor_pb2.BLOCK_OPERATION_KIND_OFFLOAD,
    executor_pb2.BLOCK_OPERATION_KIND_LOAD,
    executor_pb2.BLOCK_OPERATION_KIND_IMPORT,
)


def operation(operation_id, kind, source=0, destination=0, key=b"") -> executor_pb2.BlockOperation:
    return executor_pb2.BlockOperation(
        operation_id=operation_id,
        kind=kind,
        phase=BEFORE,
        source_block_id=source,
        destination_block_id=destination,
        key=key,
    )


class Gate:
    """Holds every read of a block on the device."""

    def __init__(self, backend) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        self._read = backend.read_block
        backend.read_block = self.read

    def read(self, block_id):
        self.reached.set()
        assert self.open.wait(20)
        return self._read(block_id)


@pytest.fixture
async def executor(empty: Executor, tmp_path) -> Executor:
    """An executor that serves the fake model: 64 blocks on the device, as many on disk, from id 64 on."""
    settings = ExecutorSettings.model_validate(
        {"block_size": 4, "kv_disk": tmp_path / "kv", "kv_disk_size": str(64 * 4096)}
    )

    def loader(name, source):
        model = loaded(empty.backend, name, source)
        return replace(model, tiers=open_tiers(settings, empty.backend, model.shape, model.fingerprint))

    empty.engine._loader = loader
    await empty.engine.load("fake", "none")
    empty.backend.kv[:] = -1
    return empty


def done(executor, failed=False) -> set[int]:
    name = "failed_operation_ids" if failed else "done_operation_ids"
    return {i for request in executor.kvmanager.requests for i in getattr(request, name)}


def closed(executor) -> set[int]:
    return {epoch for request in executor.kvmanager.requests for epoch in request.closed_epochs}


async def test_the_description_states_the_pools(executor):
    device, disk = executor.engine.description.pools
    assert (device.tier, device.first_block_id, device.block_count) == (types_pb2.TIER_DEVICE, 0, 64)
    assert (disk.tier, disk.pool_id, disk.group_id) == (types_pb2.TIER_DISK, 1, 0)
    assert (disk.first_block_id, disk.block_count) == (64, 64)
    assert (disk.format, disk.block_bytes) == (device.format, device.block_bytes)


async def test_blocks_go_out_and_come_back_while_sequences_run(executor):
    stream = await run(executor)
    full = generate([1, 2, 3], 5)
    await stream.plan(enter=[state(1, [1, 2, 3], range(4), max_tokens=5)], grants=[(1, 32, 9)])
    await stream.until_ended(1)
    await stream.plan(
        enter=[state(2, [4], range(8, 20), max_tokens=30)],
        grants=[(2, 32, 40)],
        sealed=[executor_pb2.SealedBlock(block_id=0, key=KEY)],
        operations=[operation(5, OFFLOAD, 0, 70)],
    )
    await stream.until_ended(2)
    await eventually(lambda: 5 in done(executor))
    executor.backend.kv[0] = -1
    await stream.plan(operations=[operation(6, LOAD, 70, 30, KEY), operation(7, LOAD, 71, 31, OTHER_KEY)])
    await eventually(lambda: {6, 7} <= done(executor))
    assert done(executor, failed=True) == {7}
    # What came back is the prefix of another sequence.
    await stream.plan(
        enter=[state(3, [1, 2, 3, full[0], full[1]], [30, 40, 41], computed=4, max_tokens=3)], grants=[(3, 32, 9)]
    )
    assert tokens_by_sequence(await stream.until_ended(3))[3] == full[2:]
    assert not any(results.done_operation_ids for results in stream.results)


async def test_a_restart_states_what_lies_on_disk(executor):
    stream = await run(executor)
    await stream.plan(operations=[operation(1, OFFLOAD, 3, 99, KEY), operation(2, OFFLOAD, 4, 66, OTHER_KEY)])
    await eventually(lambda: {1, 2} <= done(executor))
    await executor.engine.unload()
    seen = len(executor.kvmanager.requests)
    await executor.engine.load("fake", "none")
    heard = executor.kvmanager.requests
    await eventually(lambda: any(request.description.HasField("model") for request in heard[seen:]))
    again = next(request for request in heard[seen:] if request.description.HasField("model"))
    assert await executor.kvmanager.inventory() == {99: KEY, 66: OTHER_KEY}
    assert [pool.tier for pool in again.description.pools] == [types_pb2.TIER_DEVICE, types_pb2.TIER_DISK]


async def test_other_weights_find_nothing(executor):
    stream = await run(executor)
    await stream.plan(operations=[operation(1, OFFLOAD, 3, 99, KEY)])
    await eventually(lambda: 1 in done(executor))
    await executor.engine.unload()
    await executor.engine.load("fake", "other weights")
    heard = executor.kvmanager.requests
    wanted = executor.engine.model.fingerprint
    await eventually(lambda: any(request.description.model.fingerprint == wanted for request in heard))
    assert await executor.kvmanager.inventory() == {}


async def test_a_returning_kvmanager_hears_again_how_operations_ended(executor):
    stream = await run(executor)
    await stream.plan(operations=[operation(1, OFFLOAD, 3, 99, KEY), operation(2, IMPORT, 0, 5, KEY)])
    await eventually(lambda: {1, 2} <= done(executor))
    heard = executor.kvmanager.requests
    seen = len(heard)
    executor.kvmanager.cut.set()
    await eventually(lambda: any(request.HasField("description") for request in heard[seen:]))
    again = next(request for request in heard[seen:] if request.HasField("description"))
    assert (set(again.done_operation_ids), set(again.failed_operation_ids)) == ({1, 2}, {2})
    assert await executor.kvmanager.inventory() == {99: KEY}


async def test_an_epoch_is_closed_once_nothing_of_it_moves(executor):
    gate = Gate(executor.backend)
    first = await run(executor)
    await first.plan(operations=[operation(1, OFFLOAD, 3, 99, KEY), operation(2, OFFLOAD, 4, 98, OTHER_KEY)])
    await eventually(gate.reached.is_set)
    second = await run(executor)
    await second.plan(enter=[state(1, [7], range(8, 12))], grants=[(1, 32, 9)])
    assert tokens_by_sequence(await second.until_ended(1)) == {1: generate([7], 8)}
    await eventually(lambda: executor.kvmanager.requests[-1].epoch == 2)
    assert not closed(executor)
    gate.open.set()
    await eventually(lambda: closed(executor) == {1})
    await eventually(lambda: done(executor) == {1, 2})
    assert done(executor, failed=True) == {2}  # it had not begun


async def test_a_new_kvmanager_hears_of_blocks_once_nothing_is_written(executor):
    """What the older one asked for, the new one does not know of: none of it may begin any more."""
    gate = Gate(executor.backend)
    stream = await run(executor)
    await stream.plan(operations=[operation(1, OFFLOAD, 3, 99, KEY)])
    await eventually(gate.reached.is_set)
    kvmanager = executor.kvmanager
    seen, streams, kvmanager.first_operation_id = len(kvmanager.requests), kvmanager.streams, 100
    kvmanager.cut.set()
    await eventually(lambda: kvmanager.streams > streams)
    await stream.plan(operations=[operation(2, OFFLOAD, 4, 98, OTHER_KEY)])
    await asyncio.sleep(0.1)
    assert not any(request.HasField("description") for request in kvmanager.requests[seen:])
    gate.open.set()
    await eventually(lambda: any(request.HasField("description") for request in kvmanager.requests[seen:]))
    await stream.plan(operations=[operation(101, OFFLOAD, 5, 97, OTHER_KEY)])
    await eventually(lambda: 101 in done(executor))
    assert 2 not in done(executor)


async def test_unloading_waits_for_the_move_in_hand(executor):
    gate = Gate(executor.backend)
    stream = await run(executor)
    await stream.plan(operations=[operation(1, OFFLOAD, 3, 99, KEY)])
    await eventually(gate.reached.is_set)
    unloading = asyncio.ensure_future(executor.engine.unload())
    await asyncio.sleep(0.05)
    assert not unloading.done()
    gate.open.set()
    await asyncio.wait_for(unloading, 20)
    assert executor.engine.model is None


async def test_a_failed_warm_up_lets_go_of_the_disk(executor):
    await executor.engine.unload()
    executor.backend.bad_lengths = set(range(300))
    for _ in range(2):
        with pytest.raises(Exception, match="not finite"):
            await executor.engine.load("fake", "none")
    executor.backend.bad_lengths = set()
    await executor.engine.load("fake", "none")
    assert len(executor.engine.description.pools) == 2
