"""What the executor measures: steps, tokens, idling, sequences, blocks."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.executor.results import StepTaken
from services.executor.tiers.metrics import TierMetrics

_SECONDS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1.0, 2.0, 5.0, 15.0)


class ExecutorMetrics:
    """Written by the step thread, read by scrapes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._step = Histogram("quire_executor_step_seconds", "Computing one step", registry=registry, buckets=_SECONDS)
        self._host = Counter(
            "quire_executor_host_seconds", "Building inputs and taking outputs apart", registry=registry
        )
        self._tokens = Counter("quire_executor_tokens", "Tokens computed, prompt and output", registry=registry)
        self._sampled = Counter(
            "quire_executor_sampled_tokens", "Next tokens drawn, without those for drafts", registry=registry
        )
        self._drafts = Counter("quire_executor_draft_tokens", "Draft tokens verified", registry=registry)
        self._draft_seconds = Counter("quire_executor_draft_seconds", "Proposing draft tokens", registry=registry)
        self._idle = Counter(
            "quire_executor_idle_seconds",
            "Without anything to compute, by whether sequences were present",
            ["sequences"],
            registry=registry,
        )
        self._sequences = Gauge("quire_executor_sequences", "Sequences present", registry=registry)
        self._blocks = Gauge("quire_executor_kv_blocks", "KV blocks on the device, of all formats", registry=registry)
        self._numa = Gauge(
            "quire_executor_numa_bound",
            "1 where what computes is bound to the NUMA node, 0 where the kernel refuses",
            ["node", "part"],
            registry=registry,
        )
        self.tiers = TierMetrics(registry)
        self._idle_by = {present: self._idle.labels(present) for present in ("none", "present")}

    def step(self, taken: StepTaken, sequences: int) -> None:
        self._step.observe(taken.compute_seconds)
        self._host.inc(taken.host_seconds)
        self._tokens.inc(taken.tokens)
        self._sampled.inc(taken.sampled)
        if taken.draft_seconds or taken.catch_up_seconds:
            self._drafts.inc(taken.drafts)
            self._draft_seconds.inc(taken.draft_seconds + taken.catch_up_seconds)
        self._sequences.set(sequences)

    def rested(self, seconds: float, sequences: int) -> None:
        self._idle_by["present" if sequences else "none"].inc(seconds)

    def sequences_present(self, count: int) -> None:
        self._sequences.set(count)

    def numa_bound(self, node: int, threads: bool, memory: bool) -> None:
        self._numa.labels(str(node), "threads").set(threads)
        self._numa.labels(str(node), "memory").set(memory)

    def blocks_allocated(self, count: int) -> None:
        self._blocks.set(count)
