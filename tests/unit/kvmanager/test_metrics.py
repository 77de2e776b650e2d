"""What is scraped of pools: uses by namespace, and how long blocks live."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from services.kvmanager.manager import KvManager
from services.kvmanager.metrics import KvMetrics
from services.kvmanager.servicer import KvManagerServicer
from tests.unit.kvmanager.helpers import executor, only_executor, pool


async def test_uses_by_namespace_and_durations() -> None:
    made = KvManager(10.0)
    made.register(executor("e", pool(2, pool_id=7)), [], 1)
    (found,) = only_executor(made).pools
    found.pass_time(1.0)
    (block,) = found.acquire((), 1, "a")
    found.settle(block, b"1" * 32)
    found.release([block], [b"1" * 32])
    found.count_lookup("a", 8, 4, deepest=block)
    found.pass_time(4.0)
    found.acquire((), 2, "b")
    registry = CollectorRegistry()
    registry.register(KvMetrics(KvManagerServicer(made)))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"executor": "e", "pool": "7", **labels})

    assert [value("quire_kv_namespace_blocks", namespace=name) for name in "ab"] == [0, 2]
    assert [value("quire_kv_namespace_query_tokens_total", namespace=name) for name in "ab"] == [8, 0]
    assert value("quire_kv_namespace_hit_tokens_total", namespace="a") == 4
    assert value("quire_kv_namespace_evictions_total", namespace="a") == 1
    assert value("quire_kv_namespace_evictions_total", namespace="(others)") == 0
    for what in ("lifetime", "idle_before_evict"):
        assert value(f"vllm:kv_block_{what}_seconds_sum") == 3.0
        assert value(f"vllm:kv_block_{what}_seconds_count") == 1
        assert value(f"vllm:kv_block_{what}_seconds_bucket", le="2.0") == 0
        assert value(f"vllm:kv_block_{what}_seconds_bucket", le="5.0") == 1
    assert value("vllm:kv_block_reuse_gap_seconds_bucket", le="0.01") == 1
