"""Block operations in the core: what is refused, when moves begin, what their ends change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.v1 import executor_pb2
from services.common.errors import QuireError, Reason
from services.common.kv_policy import KvPolicy
from services.executor.batch import StepLimits
from services.executor.operations import Move, check_operation
from services.executor.tiers.pools import DISK, HOST, PoolMap, device_pools, lower_pools
from services.executor.tiers.store import NO_KEY
from services.executor.worker import Closed, Moved
from tests.unit.executor.conftest import Bench, make_bench
from tests.unit.executor.fake_backend import FakeBackend, loaded
from tests.unit.executor.plans import state, tokens_by_sequence

PROMPT = [5, 6, 7]
KEY, OTHER_KEY = b"k" * 32, b"o" * 32
BEFORE, AFTER = executor_pb2.BLOCK_OPERATION_PHASE_BEFORE, executor_pb2.BLOCK_OPERATION_PHASE_AFTER
OFFLOAD, LOAD, EXPORT, IMPORT, COPY, DEMOTE = (
    executor_pb2.BLOCK_OPERATION_KIND_OFFLOAD,
    executor_pb2.BLOCK_OPERATION_KIND_LOAD,
    executor_pb2.BLOCK_OPERATION_KIND_EXPORT,
    executor_pb2.BLOCK_OPERATION_KIND_IMPORT,
    executor_pb2.BLOCK_OPERATION_KIND_COPY,
    executor_pb2.BLOCK_OPERATION_KIND_DEMOTE,
)


def operation(operation_id, kind, source=0, destination=0, phase=BEFORE, **fields) -> executor_pb2.BlockOperation:
    return executor_pb2.BlockOperation(
        operation_id=operation_id,
        kind=kind,
        phase=phase,
        source_block_id=source,
        destination_block_id=destination,
        **fields,
    )


def pools_of(model) -> PoolMap:
    """The device's, then as many blocks on disk."""
    device = device_pools(model.shape, model.backend.kv_format)
    whole = sum(pool.count * pool.block_bytes for pool in device)
    return PoolMap([*device, *lower_pools(device, DISK, whole)])


class HeldTiers:
    """Moves that end when the test says so."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.begun: list[Move] = []

    def submit(self, move: Move) -> None:
        self.begun.append(move)

    def drop(self) -> None:
        pass

    def end(self, operation_id: int, is_done: bool = True) -> None:
        (move,) = (move for move in self.begun if move.operation_id == operation_id)
        self.begun.remove(move)
        self.bench.loop.move_ended(move, is_done)


@pytest.fixture
def bench() -> Bench:
    """64 blocks on the device, ids 64 to 127 on disk."""
    made = make_bench(StepLimits(sequences=8, tokens=32))
    model = loaded(made.backend)
    made.core.set_model(replace(model.limits, pools=pools_of(model)))
    made.loop.tiers = HeldTiers(made)
    return made


def begun(bench) -> list[int]:
    return [move.operation_id for move in bench.loop.tiers.begun]


def ends(sent) -> list[tuple[int, bool]]:
    return [(event.operation_id, event.is_done) for event in sent if isinstance(event, Moved)]


MIXED = pools_of(loaded(FakeBackend(), policy=KvPolicy.parse("hot:128,int8:256,int4")))  # six pools of 64


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (operation(1, OFFLOAD, 0, 1), Reason.PROTOCOL),  # both on the device
        (operation(1, OFFLOAD, 192, 0), Reason.PROTOCOL),  # upwards
        (operation(1, LOAD, 0, 192), Reason.PROTOCOL),  # downwards
        (operation(1, LOAD, 192, 193), Reason.PROTOCOL),  # on disk
        (operation(1, COPY, 192, 193), Reason.PROTOCOL),
        (operation(1, COPY, 0, 64), Reason.PROTOCOL),  # into another format
        (operation(1, COPY, 64, 65), Reason.PROTOCOL),  # of blocks that steps do not write
        (operation(1, OFFLOAD, 0, 256), Reason.PROTOCOL),  # into another format
        (operation(1, LOAD, 320, 64), Reason.PROTOCOL),
        (operation(1, OFFLOAD, 0, 384), Reason.PROTOCOL),  # no such block
        (operation(1, OFFLOAD, -1, 192), Reason.PROTOCOL),
        (operation(1, EXPORT, 384, key=KEY), Reason.PROTOCOL),
        (operation(1, IMPORT, 0, 384, key=KEY), Reason.PROTOCOL),
        (operation(1, EXPORT, 0), Reason.PROTOCOL),  # without a key
        (operation(1, EXPORT, 0, key=b"k"), Reason.PROTOCOL),
        (operation(1, OFFLOAD, 0, 192, key=b"k"), Reason.PROTOCOL),
        (operation(1, OFFLOAD, 0, 192, source_pool_id=1), Reason.PROTOCOL),
        (operation(1, OFFLOAD, 0, 192, destination_pool_id=9), Reason.PROTOCOL),
        (operation(1, OFFLOAD, 0, 192, group_id=1), Reason.PROTOCOL),
        (operation(1, OFFLOAD, 0, 192, phase=0), Reason.PROTOCOL),
        (operation(1, EXPORT, 0, key=KEY, peer="elsewhere"), Reason.UNSUPPORTED),
        (operation(1, DEMOTE, 0, 64), Reason.UNSUPPORTED),
        (operation(1, 0, 0, 1), Reason.UNSUPPORTED),
    ],
)
def test_malformed_operations_are_refused(refused, reason):
    with pytest.raises(QuireError, match="operations") as raised:
        check_operation(refused, MIXED)
    assert raised.value.reason is reason


@pytest.mark.parametrize(
    "accepted",
    [
        operation(1, COPY, 0, 63),
        operation(1, OFFLOAD, 0, 192, source_pool_id=0, destination_pool_id=3),
        operation(1, OFFLOAD, 64, 256, key=KEY),
        operation(1, LOAD, 383, 191),
        operation(1, EXPORT, 256, key=KEY),
        operation(1, IMPORT, 0, 70, key=KEY),
    ],
)
def test_well_formed_operations(accepted):
    check_operation(accepted, MIXED)


def test_a_refused_operation_changes_nothing(bench):
    with pytest.raises(QuireError):
        bench.take(operations=[operation(1, OFFLOAD, 0, 64), operation(2, OFFLOAD, 0, 1)])
    bench.run()
    assert not begun(bench)
    assert bench.core.operations.idle


def test_an_operation_that_comes_again_is_done_once(bench):
    again = operation(1, LOAD, 65, 3)
    bench.take(operations=[again, again])
    bench.take(operations=[again])
    bench.run()
    bench.take(operations=[again])
    bench.run()
    assert begun(bench) == [1]
    bench.loop.tiers.end(1)
    bench.take(operations=[again])
    bench.run()
    assert begun(bench) == []
    assert ends(bench.sent) == [(1, True)]


def test_what_an_older_epoch_was_asked_for_is_not_done_for_a_newer_one(bench):
    """The kvmanager counted it as over when the older one was closed."""
    bench.take(enter=[state(1, PROMPT, range(4), max_tokens=12)], grants=[(1, 1, 1)])
    late = operation(1, OFFLOAD, 0, 64)
    bench.take(operations=[late])
    bench.run()
    assert bench.loop.open(executor_pb2.RunHello(scheduler_id="next")).closed_epochs == [1]
    bench.step = 0
    bench.take(operations=[late, operation(2, LOAD, 66, 4)])
    bench.run()
    assert begun(bench) == [2]


def test_while_the_kvmanager_is_told_what_there_is_nothing_begins(bench):
    bench.take(operations=[operation(7, LOAD, 65, 3)])
    bench.core.operations.hold()
    bench.run()
    bench.take(operations=[operation(9, LOAD, 66, 4), operation(8, OFFLOAD, 9, 67)])
    bench.run()
    assert begun(bench) == []
    assert bench.core.operations.idle
    bench.core.operations.resume(8)  # 7 was asked for by a kvmanager that is gone
    bench.run()
    assert begun(bench) == [9, 8]
    bench.take(operations=[operation(6, LOAD, 65, 3)])
    bench.run()
    assert begun(bench) == [9, 8]


def test_offload_and_load_keep_the_inventory(bench):
    bench.take(sealed=[executor_pb2.SealedBlock(block_id=9, key=KEY)], operations=[operation(1, OFFLOAD, 9, 70)])
    bench.run()
    (move,) = bench.loop.tiers.begun
    assert (move.source, move.destination, move.key, move.kind, move.tier) == (9, 70, KEY, "offload", "disk")
    assert bench.core.inventory.key_of(70) == NO_KEY  # not before it is there
    bench.loop.tiers.end(1)
    assert bench.core.inventory.key_of(70) == KEY
    bench.take(operations=[operation(2, LOAD, 70, 5)])
    bench.run()
    assert bench.loop.tiers.begun[0].key == KEY
    bench.loop.tiers.end(2)
    assert bench.core.inventory.key_of(5) == KEY
    assert ends(bench.sent) == [(1, True), (2, True)]


def test_a_destination_is_unknown_from_the_start_and_stays_so_after_failure(bench):
    sealed = [executor_pb2.SealedBlock(block_id=i, key=key) for i, key in ((9, KEY), (4, OTHER_KEY))]
    bench.take(sealed=sealed)
    bench.take(operations=[operation(1, IMPORT, 0, 4, key=KEY)])
    bench.run()
    assert bench.core.inventory.key_of(4) == NO_KEY
    bench.loop.tiers.end(1, is_done=False)
    assert bench.core.inventory.key_of(4) == NO_KEY
    assert ends(bench.sent) == [(1, False)]


def test_a_key_that_is_stated_wins(bench):
    bench.take(operations=[operation(1, OFFLOAD, 9, 70, key=OTHER_KEY), operation(2, EXPORT, 9, key=KEY)])
    bench.run()
    assert [move.key for move in bench.loop.tiers.begun] == [OTHER_KEY, KEY]
    assert [move.tier for move in bench.loop.tiers.begun] == ["disk", "remote"]


def test_a_source_that_is_still_written_is_waited_for(bench):
    """Block 1 holds tokens 4 to 7, which earlier plans' steps write."""
    bench.take(enter=[state(1, PROMPT, range(4), max_tokens=12)], grants=[(1, 32, 1), (1, 1, 4)])
    bench.take(operations=[operation(1, OFFLOAD, 1, 64), operation(2, OFFLOAD, 9, 65)])
    bench.run(1)
    assert begun(bench) == [2]
    bench.run(4)
    assert bench.core.sequences[1].computed == 7
    bench.take(grants=[(1, 1, 2)])
    bench.run(1)
    assert begun(bench) == [2]
    bench.run()
    assert begun(bench) == [2, 1]


def test_what_an_ended_sequence_left_is_settled(bench):
    bench.take(enter=[state(1, PROMPT, range(4), max_tokens=12)], grants=[(1, 32, 1)])
    bench.run()
    bench.take(ended_sequence_ids=[1], operations=[operation(1, OFFLOAD, 0, 64)])
    bench.run()
    assert begun(bench) == [1]


def test_after_means_after_the_next_step(bench):
    bench.take(
        enter=[state(1, PROMPT, range(4), max_tokens=12)],
        grants=[(1, 32, 1), (1, 1, 3)],
        operations=[operation(1, EXPORT, 9, phase=AFTER, key=KEY)],
    )
    seen = []
    step = bench.backend.step
    bench.backend.step = lambda inputs: (seen.append(begun(bench)), step(inputs))[1]
    bench.run()
    assert seen[:2] == [[], [1]]


def test_moves_do_not_hold_up_steps(bench):
    bench.take(
        enter=[state(1, PROMPT, range(4), max_tokens=8)],
        grants=[(1, 32, 1), (1, 1, 20)],
        operations=[operation(1, OFFLOAD, 20, 64), operation(2, LOAD, 65, 21)],
    )
    sent = bench.run()
    assert len(tokens_by_sequence([event for event in sent if hasattr(event, "token_ids")])[1]) == 8
    assert begun(bench) == [1, 2]


def test_a_closed_epoch_means_that_nothing_is_written_any_more(bench):
    bench.take(operations=[operation(1, LOAD, 70, 5), operation(2, OFFLOAD, 9, 71)])
    bench.run()
    hello = executor_pb2.RunHello(scheduler_id="next")
    assert bench.loop.open(hello).closed_epochs == []
    assert bench.loop.open(hello).closed_epochs == []  # 2 waits for 1
    bench.loop.tiers.end(2)
    assert not [event for event in bench.sent if isinstance(event, Closed)]
    bench.loop.tiers.end(1)
    assert [event.epochs for event in bench.sent if isinstance(event, Closed)] == [[1, 2]]
    assert bench.loop.open(hello).closed_epochs == [3]


def test_without_lower_tiers_remote_moves_fail(bench):
    bench.loop.tiers = None
    bench.take(operations=[operation(1, IMPORT, 0, 4, key=KEY)])
    bench.run()
    assert ends(bench.sent) == [(1, False)]


def test_pools_follow_each_other_and_keep_the_devices_proportions():
    model = loaded(FakeBackend(), blocks=10, policy=KvPolicy.parse("hot:128,int8"))
    device = device_pools(model.shape, "fp32")
    host = lower_pools(device, HOST, 3 * 10 * (256 + 64))
    disk = lower_pools([*device, *host], DISK, 7 * 10 * (300 + 100), lambda size: {256: 300, 64: 100}[size])
    pools = PoolMap([*device, *host, *disk])
    assert [(pool.pool_id, pool.tier, pool.format, pool.first, pool.count) for pool in pools.pools] == [
        (0, "device", "fp32", 0, 10),
        (1, "device", "int8", 10, 10),
        (2, "host", "fp32", 20, 30),
        (3, "host", "int8", 50, 30),
        (4, "disk", "fp32", 80, 70),
        (5, "disk", "int8", 150, 70),
    ]
    assert [pools.find(block).pool_id for block in (0, 9, 10, 19, 20, 79, 80, 219)] == [0, 0, 1, 1, 2, 3, 4, 5]
    assert pools.find(-1) is pools.find(220) is None
    with pytest.raises(ValueError, match="no fp32 block"):
        lower_pools(device, DISK, 300)
