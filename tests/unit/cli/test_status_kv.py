"""`quire status --kv`: what the kvmanager states, as tables and as data."""

from __future__ import annotations

import json

import pytest

from quire import cli
from quire.v1 import kvmanager_pb2, types_pb2
from tests.unit.cli.conftest import Gateway

Running = tuple[Gateway, str]
Capture = pytest.CaptureFixture[str]


def fill(made: Gateway) -> kvmanager_pb2.GetKvStatusResponse:
    """An executor with a hot and a cold pool, one on its node's disk, and one that left the scheduler."""
    scheduler = made.status.scheduler
    executor = scheduler.executors.add(target="127.0.0.1:1", connected=True)
    executor.description.executor_id = "a"
    executor.description.model.name = "m"
    kv = scheduler.kv
    device, disk = types_pb2.TIER_DEVICE, types_pb2.TIER_DISK
    bf16, int4 = types_pb2.KV_FORMAT_BF16, types_pb2.KV_FORMAT_INT4
    for tier, format_, size, free, cached, leased in (
        (device, bf16, 1 << 20, 1000, 150, 50),
        (device, int4, 1 << 19, 10, 0, 0),
        (disk, bf16, 1 << 20, 0, 4, 0),
    ):
        pool = types_pb2.BlockPool(tier=tier, format=format_, rank_nodes=[1], distance=10, block_bytes=size)
        pool.block_count = free + cached + leased
        kv.pools.add(executor_id="a", pool=pool, free_count=free, cached_count=cached, leased_count=leased)
    kv.pools.add(executor_id="gone", free_count=3).pool.block_count = 3
    kv.sequence_count, kv.parked_count, kv.evicted_count = 7, 2, 1234
    kv.prefix_query_tokens, kv.prefix_hit_tokens = 8000, 2000
    kv.namespaces.add(namespace="", query_tokens=6000, hit_tokens=2000, block_count=180)
    kv.namespaces.add(namespace="tenant-b", query_tokens=0, hit_tokens=0, block_count=20)
    return kv


def test_as_data(gateway: Running, capsys: Capture) -> None:
    made, address = gateway
    fill(made)
    assert cli.main(["status", "--kv", "--json", "--address", address]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["address"], said["error"]) == (address, None)
    kv = said["kv"]
    assert kv["pools"][1] == {
        "executor_id": "a", "executor": "127.0.0.1:1", "model": "m", "group": 0, "nodes": [1], "tier": "device",
        "format": "int4", "distance": 10, "block_bytes": 1 << 19, "bytes": 5 << 20, "blocks": 10, "free": 10,
        "cached": 0, "leased": 0,
    }  # fmt: skip
    assert kv["totals"] == [
        {"tier": "device", "bytes": 1205 << 20, "blocks": 1210, "free": 1010, "cached": 150, "leased": 50},
        {"tier": "disk", "bytes": 4 << 20, "blocks": 4, "free": 0, "cached": 4, "leased": 0},
        {"tier": "unspecified", "bytes": None, "blocks": 3, "free": 3, "cached": 0, "leased": 0},
    ]
    assert (kv["sequences"], kv["parked"], kv["evicted_blocks"], kv["violations"]) == (7, 2, 1234, [])
    assert kv["prefix"] == {"query_tokens": 8000, "hit_tokens": 2000, "hit_rate": 0.25}
    assert kv["namespaces"] == [
        {"namespace": "", "blocks": 180, "query_tokens": 6000, "hit_tokens": 2000, "hit_rate": 0.3333},
        {"namespace": "tenant-b", "blocks": 20, "query_tokens": 0, "hit_tokens": 0, "hit_rate": None},
    ]


def test_as_tables(gateway: Running, capsys: Capture) -> None:
    made, address = gateway
    fill(made)
    assert cli.main(["status", "--kv", "--address", address]) == 0
    assert (
        capsys.readouterr().out
        == """\
EXECUTOR     MODEL  NODE  TIER         FORMAT       BLOCK BYTES      MIB  BLOCKS   FREE  CACHED  LEASED
127.0.0.1:1  m      1     device       bf16           1,048,576  1,200.0   1,200  1,000     150      50
127.0.0.1:1  m      1     device       int4             524,288      5.0      10     10       0       0
127.0.0.1:1  m      1     disk         bf16           1,048,576      4.0       4      0       4       0
gone         -      -     unspecified  unspecified            -        -       3      3       0       0
all                       device                                 1,205.0   1,210  1,010     150      50
all                       disk                                       4.0       4      0       4       0
all                       unspecified                                  -       3      3       0       0

prefixes: 25.0% of 8,000 prompt tokens found, 1,234 blocks evicted
sequences: 7 hold blocks, 2 reservations wait for a prefix

NAMESPACE  BLOCKS  PROMPT TOKENS  FOUND
(default)     180          6,000  33.3%
tenant-b       20              0      -
"""
    )


def test_a_violation_is_shown_and_is_a_failure(gateway: Running, capsys: Capture) -> None:
    made, address = gateway
    fill(made).violations.append("block 3 is free and leased")
    assert cli.main(["status", "--kv", "--address", address]) == 1
    assert capsys.readouterr().out.endswith("\n\nVIOLATION: block 3 is free and leased\n")


def test_an_idle_kvmanager(gateway: Running, capsys: Capture) -> None:
    made, address = gateway
    made.status.scheduler.kv.SetInParent()
    assert cli.main(["status", "--kv", "--address", address]) == 0
    assert capsys.readouterr().out == (
        "no pools\n\nprefixes: - of 0 prompt tokens found, 0 blocks evicted\n"
        "sequences: 0 hold blocks, 0 reservations wait for a prefix\n"
    )


def test_an_absent_kvmanager_is_named(gateway: Running, capsys: Capture) -> None:
    made, address = gateway
    made.status.scheduler.SetInParent()
    assert cli.main(["status", "--kv", "--address", address]) == 1
    assert capsys.readouterr().out == "the kvmanager does not answer\n"
    assert cli.main(["status", "--kv", "--json", "--address", "127.0.0.1:9"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["kv"] is None
    assert "127.0.0.1:9" in said["error"]
