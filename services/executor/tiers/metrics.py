"""What moves between tiers cost."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class TierMetrics:
    """Written by the threads that move blocks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._operations = Counter(
            "quire_kv_tier_operations",
            "Moves of KV blocks by lower tier, kind and how they ended",
            ["tier", "kind", "outcome"],
            registry=registry,
        )
        self._bytes = Counter("quire_kv_tier_bytes", "KV moved", ["tier", "kind"], registry=registry)
        self._seconds = Histogram(
            "quire_kv_tier_seconds", "One move that was made", ["tier", "kind"], registry=registry, buckets=_SECONDS
        )

    def ended(self, tier: str, kind: str, outcome: str) -> None:
        self._operations.labels(tier, kind, outcome).inc()

    def made(self, tier: str, kind: str, byte_count: int, seconds: float) -> None:
        self._bytes.labels(tier, kind).inc(byte_count)
        self._seconds.labels(tier, kind).observe(seconds)
