"""Metrics of requests, with vLLM's names, labels and buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.placing.placing import Placing

LABELS = ("model_name", "engine")
ENGINE = "0"
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
INTER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


class GatewayMetrics:
    """The instruments; one set per gateway."""

    def __init__(self, registry: CollectorRegistry, open_requests: Callable[[], int]) -> None:
        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=registry)

        self.first_token = histogram("time_to_first_token_seconds", "Arrival to first token", FIRST_TOKEN)
        self.inter_token = histogram("inter_token_latency_seconds", "Time between tokens of a choice", INTER_TOKEN)
        self.latency = histogram("e2e_request_latency_seconds", "Arrival to last token", LATENCY)
        self.prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request", TOKENS)
        self.generation_tokens = histogram("request_generation_tokens", "Output tokens of a request", TOKENS)
        self.finished = Counter(
            "vllm:request_success", "Requests by how they ended", (*LABELS, "finished_reason"), registry=registry
        )
        gauge = Gauge("quire_gateway_open_requests", "Requests open at this gateway", registry=registry)
        gauge.set_function(open_requests)


COUNTS = {
    "quire_gateway_attached": ("Calls that joined a stream that was there.", "how", ("repeat", "resume", "adopted")),
    "quire_gateway_shed": ("Requests refused for load.", "why", ("queue_time", "open_tokens", "circuit_open")),
    "quire_gateway_attempts": ("Requests given to a scheduler once more.", "why", ("retry", "hedge")),
    "quire_gateway_unjournaled": ("Streams that go on without a journal.", "why", ("streams", "bytes")),
}
"""Text, label and its values, by name. "adopted" are streams that came from another gateway."""


class ResilienceMetrics(Collector):
    """What the gateway did about load and loss. Runs in the metrics server's thread: reads counts only."""

    def __init__(self, placing: Placing) -> None:
        self._placing = placing

    def collect(self) -> Iterable[Metric]:
        for name, (text, label, values) in COUNTS.items():
            counter = CounterMetricFamily(name, text, labels=[label])
            for value in values:
                counter.add_metric([value], self._placing.counts[value])
            yield counter
        text = "0 closed, 1 half open, 2 open: the scheduler is not asked for the model."
        breakers = GaugeMetricFamily("quire_gateway_breaker_state", text, labels=["scheduler", "model_name"])
        for (scheduler, model), phase in self._placing.phases().items():
            breakers.add_metric([scheduler, model], phase)
        yield breakers
        up = GaugeMetricFamily("quire_gateway_scheduler_up", "1 while the stream is up.", labels=["scheduler"])
        for side in self._placing.sides:
            up.add_metric([side.name], side.connected)
        yield up


class RequestMeter:
    """Times one request. A request counts once, however many choices it has."""

    def __init__(self, metrics: GatewayMetrics, model: str, arrived_at: float) -> None:
        self._metrics, self._model, self._arrived_at = metrics, model, arrived_at
        self._first = metrics.first_token.labels(model, ENGINE)
        self._inter = metrics.inter_token.labels(model, ENGINE)
        self._last: dict[int, float] = {}

    def tokens(self, choice: int, count: int, now: float) -> None:
        """New tokens of a choice arrived together; the time since the last ones is shared among them."""
        if not self._last:
            self._first.observe(now - self._arrived_at)
        last = self._last.get(choice)
        self._last[choice] = now
        if last is not None:
            for _ in range(count):
                self._inter.observe((now - last) / count)

    def finish(self, reason: str, prompt_tokens: int, output_tokens: int, now: float) -> None:
        """The request ended as "stop", "length", "abort" or "error"."""
        metrics = self._metrics
        metrics.finished.labels(self._model, ENGINE, reason).inc()
        metrics.latency.labels(self._model, ENGINE).observe(now - self._arrived_at)
        metrics.prompt_tokens.labels(self._model, ENGINE).observe(prompt_tokens)
        metrics.generation_tokens.labels(self._model, ENGINE).observe(output_tokens)
