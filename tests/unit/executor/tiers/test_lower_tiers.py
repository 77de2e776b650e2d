"""Stores, pools and threads together, over a backend without a model."""

from __future__ import annotations

import logging
import os
import queue
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from services.common.errors import QuireError, Reason
from services.executor.operations import REMOTE, Move
from services.executor.settings import ExecutorSettings
from services.executor.tiers.lower_tiers import open_tiers
from services.executor.tiers.metrics import TierMetrics
from services.executor.tiers.store import NO_KEY, Outcome
from tests.unit.executor.fake_backend import FakeBackend, loaded
from tests.unit.executor.tiers.fake_redis import FakeRedis

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
MODEL = "ab" * 32
AGES = {"kv": "hot+warm+cold", "kv_hot_tokens": 128, "kv_warm_tokens": 256}


def settings_of(**fields) -> ExecutorSettings:
    return ExecutorSettings.model_validate({"block_size": 4, **fields})


@contextmanager
def tiers_of(settings, backend=None, fingerprint=MODEL):
    """Open tiers over a fake backend with 8 blocks in each format, their `run` making moves to their end."""
    backend = backend or FakeBackend()
    model = loaded(backend, blocks=8, policy=settings.kv_policy)
    for block in range(len(backend.kv)):
        backend.kv[block] = block
    tiers = open_tiers(settings, backend, replace(model.shape, block_size=settings.block_size), fingerprint)
    ended: queue.Queue = queue.Queue()
    made: list[tuple[int, float]] = []
    registry = CollectorRegistry()
    tiers.start(
        TierMetrics(registry),
        lambda move, outcome: ended.put((move.operation_id, outcome)),
        lambda byte_count, seconds: made.append((byte_count, seconds)),
    )

    def run(*moves) -> list[Outcome]:
        for move in moves:
            tiers.submit(move)
        found = dict(ended.get(timeout=20) for _ in moves)
        return [found[move.operation_id] for move in moves]

    tiers.run, tiers.backend, tiers.registry, tiers.made = run, backend, registry, made
    try:
        yield tiers
    finally:
        tiers.close()


def move(operation_id, kind, source, destination, key=KEY, tier="disk") -> Move:
    return Move(1, operation_id, kind, tier, source, destination, key)


def test_each_format_goes_to_disk_and_comes_back(tmp_path):
    settings = settings_of(kv_disk=tmp_path, kv_disk_size="1MiB", **AGES)
    with tiers_of(settings) as tiers:
        lower = tiers.pools.lower
        assert [pool.format for pool in lower] == ["fp32", "int8", "int4"]
        for number, (device, disk) in enumerate(zip(tiers.pools.pools, lower, strict=False)):
            source, slot = device.first + 3, disk.end - 1
            before = tiers.backend.kv[source].copy()
            assert tiers.run(move(number, "offload", source, slot)) == [Outcome.DONE]
            tiers.backend.kv[source] = -7
            assert tiers.run(move(number + 10, "load", slot, source + 1)) == [Outcome.DONE]
            assert (tiers.backend.kv[source + 1] == before).all()
            assert tiers.run(move(number + 20, "load", slot, source + 1, OTHER_KEY)) == [Outcome.MISSING]
        sizes = [pool.block_bytes for pool in lower for _ in range(2)]
        assert [byte_count for byte_count, _ in tiers.made] == sizes  # what failed is not counted
        assert all(seconds > 0 for _, seconds in tiers.made)


def test_a_restart_finds_blocks_by_their_ids(tmp_path):
    settings = settings_of(kv_disk=tmp_path, kv_disk_size="1MiB", **AGES)
    with tiers_of(settings) as tiers:
        assert not list(tiers.found())
        moves = [
            move(number, "offload", device.first, disk.first + number, bytes([number + 1]) * 32)
            for number, (device, disk) in enumerate(zip(tiers.pools.pools, tiers.pools.lower, strict=False))
        ]
        assert set(tiers.run(*moves)) == {Outcome.DONE}
        assert tiers.run(move(9, "offload", 1, tiers.pools.lower[0].first + 5, NO_KEY)) == [Outcome.DONE]
    with tiers_of(settings) as tiers:
        assert dict(tiers.found()) == {move.destination: move.key for move in moves}
        assert tiers.run(move(1, "load", moves[1].destination, moves[1].source + 1, moves[1].key)) == [Outcome.DONE]
        assert (tiers.backend.kv[moves[1].source + 1] == moves[1].source).all()


@pytest.mark.parametrize("change", ["model", "policy", "block size", "nothing"])
def test_what_others_left_is_not_found(tmp_path, change):
    fields = {"kv_disk": tmp_path, "kv_disk_size": "64KiB"}
    with tiers_of(settings_of(**fields)) as tiers:
        assert tiers.run(move(1, "offload", 0, 8)) == [Outcome.DONE]
    if change == "policy":
        fields |= AGES
    if change == "block size":
        fields["block_size"] = 8
    with tiers_of(settings_of(**fields), fingerprint="cd" * 32 if change == "model" else MODEL) as tiers:
        assert list(tiers.found()) == ([(8, KEY)] if change == "nothing" else [])


def test_host_memory_below_a_device_of_its_own():
    class Card(FakeBackend):
        computes_from_host_memory = False

    with tiers_of(settings_of(kv_host_memory="4KiB"), Card()) as tiers:
        (pool,) = tiers.pools.lower
        assert (pool.tier, pool.count, pool.first) == ("host", 16, 8)
        assert tiers.run(move(1, "offload", 3, 10, tier="host")) == [Outcome.DONE]
        assert tiers.run(move(2, "load", 10, 4, tier="host")) == [Outcome.DONE]
        assert (tiers.backend.kv[4] == 3).all()
        assert tiers.run(move(3, "load", 11, 5, tier="host")) == [Outcome.MISSING]


def test_from_host_memory_on_to_disk(tmp_path):
    class Card(FakeBackend):
        computes_from_host_memory = False

    settings = settings_of(kv_host_memory="4KiB", kv_disk=tmp_path, kv_disk_size="64KiB")
    with tiers_of(settings, Card()) as tiers:
        host, disk = tiers.pools.lower
        assert tiers.run(move(1, "offload", 3, host.first, tier="host")) == [Outcome.DONE]
        assert tiers.run(move(2, "offload", host.first, disk.first)) == [Outcome.DONE]
        assert tiers.run(move(3, "load", disk.first, 5)) == [Outcome.DONE]
        assert (tiers.backend.kv[5] == 3).all()


def test_remote_moves(tmp_path):
    server = FakeRedis()
    with tiers_of(settings_of(kv_remote=server.url)) as tiers:
        assert not tiers.pools.lower
        assert tiers.run(move(1, "export", 3, None, tier=REMOTE)) == [Outcome.DONE]
    with tiers_of(settings_of(kv_remote=server.url)) as tiers:
        assert tiers.run(move(1, "import", None, 4, tier=REMOTE)) == [Outcome.DONE]
        assert (tiers.backend.kv[4] == 3).all()
        assert tiers.run(move(2, "import", None, 5, OTHER_KEY, tier=REMOTE)) == [Outcome.MISSING]
        server.close()
        assert tiers.run(move(3, "import", None, 5, tier=REMOTE)) == [Outcome.UNREACHABLE]


def test_without_a_remote_store_its_moves_fail(tmp_path):
    with tiers_of(settings_of(kv_disk=tmp_path, kv_disk_size="64KiB")) as tiers:
        assert tiers.run(move(1, "export", 3, None, tier=REMOTE)) == [Outcome.UNREACHABLE]


def test_a_slow_remote_store_does_not_hold_up_the_disk(tmp_path):
    server = FakeRedis()
    server.silent = True
    with tiers_of(settings_of(kv_disk=tmp_path, kv_disk_size="64KiB", kv_remote=server.url)) as tiers:
        tiers.submit(move(1, "export", 3, None, tier=REMOTE))
        started = time.monotonic()
        assert tiers.run(move(2, "offload", 3, 8)) == [Outcome.DONE]
        assert time.monotonic() - started < 1  # its patience is 2 seconds
        server.close()


def test_metrics(tmp_path):
    with tiers_of(settings_of(kv_disk=tmp_path, kv_disk_size="64KiB")) as tiers:
        tiers.run(move(1, "offload", 3, 8), move(2, "offload", 4, 9), move(3, "load", 12, 5))

        def value(name, **labels):
            return tiers.registry.get_sample_value(name, labels)

        assert value("quire_kv_tier_operations_total", tier="disk", kind="offload", outcome="done") == 2
        assert value("quire_kv_tier_operations_total", tier="disk", kind="load", outcome="missing") == 1
        assert value("quire_kv_tier_bytes_total", tier="disk", kind="offload") == 2 * 256
        assert value("quire_kv_tier_seconds_count", tier="disk", kind="offload") == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_host_memory": "1GiB"}, "kv_host_memory: the fake backend computes from host memory"),
        ({"kv_disk": "/proc/nowhere"}, "kv_disk: /proc/nowhere"),
        ({"kv_disk": "{tmp}", "kv_disk_size": "1KiB"}, "kv_disk_size: 1024 bytes hold no fp32 block"),
        ({"kv_disk": "{tmp}", "kv_disk_size": "9000000TiB"}, "kv_disk_size: 9e+06 TiB are more than the disk's "),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(tmp_path, fields, message):
    fields = {name: value.format(tmp=tmp_path) for name, value in fields.items()}
    with pytest.raises(QuireError) as raised, tiers_of(settings_of(**fields)):
        pass
    assert raised.value.reason is Reason.MODEL_LOAD_FAILED
    assert raised.value.message.startswith(message)


def test_more_host_memory_than_there_is():
    class Card(FakeBackend):
        computes_from_host_memory = False

    settings = settings_of(kv_host_memory="1000000TiB")
    with pytest.raises(QuireError, match=r"kv_host_memory: .* are free"), tiers_of(settings, Card()):
        pass


def test_a_disk_that_is_too_small_is_warned_of(tmp_path, caplog):
    state = os.statvfs(tmp_path)
    size = str(state.f_blocks * state.f_frsize)  # all of it, and others have some
    with caplog.at_level(logging.WARNING), tiers_of(settings_of(kv_disk=tmp_path, kv_disk_size=size)):
        pass
    assert "less room" in caplog.text


def test_no_tiers_by_default():
    backend = FakeBackend()
    assert open_tiers(settings_of(), backend, loaded(backend).shape, MODEL) is None


def test_close_lets_go_of_the_shelf(tmp_path):
    settings = settings_of(kv_disk=tmp_path, kv_disk_size="64KiB")
    for _ in range(2):
        with tiers_of(settings) as first, tiers_of(settings) as second:
            assert first.run(move(1, "offload", 3, 8)) == second.run(move(1, "offload", 3, 8)) == [Outcome.DONE]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "lock"]


def test_content_is_what_the_source_held_when_it_was_asked_for(tmp_path):
    """The fake hands out copies, real backends views: nothing may be kept beyond the move."""
    with tiers_of(settings_of(kv_disk=tmp_path, kv_disk_size="64KiB")) as tiers:
        for turn in range(20):
            tiers.backend.kv[3] = turn
            assert tiers.run(move(turn, "offload", 3, 8)) == [Outcome.DONE]
            assert tiers.run(move(100 + turn, "load", 8, 4)) == [Outcome.DONE]
            assert np.array_equal(tiers.backend.kv[4], [turn] * 4)
