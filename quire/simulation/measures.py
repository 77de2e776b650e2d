"""What clients of a simulated world saw, gathered as it happens: nothing is kept of a request that has ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.simulation.fairness import Fairness
from quire.simulation.histogram import Histogram
from quire.simulation.load import Tenant

SERIES_POINTS = 400
"""Points of a series: where there would be more, neighbours are joined."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What a good answer keeps to, in seconds; None for anything."""

    first_token: float | None = None
    token_gap: float | None = None  # on average over the answer


@dataclass(slots=True)
class Open:
    """A request that has not ended. Times in seconds."""

    arrived_at: float
    prompt_tokens: int
    tenant: int
    cached_tokens: int = 0
    is_placed: bool = False
    first_at: float = 0.0
    last_at: float = 0.0
    output_tokens: int = 0


@dataclass(slots=True)
class TenantMeasures:
    """What one tenant got."""

    requests: int = 0
    output_tokens: int = 0
    first_token: Histogram = field(default_factory=Histogram)


class Series:
    """Sums over equal stretches of time, whose length doubles as time goes on."""

    def __init__(self) -> None:
        self.seconds = 1.0
        self.sums: list[float] = []

    def add(self, now: float, amount: float) -> None:
        index = int(now / self.seconds)
        while index >= SERIES_POINTS:
            self.seconds *= 2
            if len(self.sums) % 2:
                self.sums.append(0.0)
            self.sums = [a + b for a, b in zip(self.sums[::2], self.sums[1::2], strict=True)]
            index = int(now / self.seconds)
        if index >= len(self.sums):
            self.sums += [0.0] * (index + 1 - len(self.sums))
        self.sums[index] += amount


class Measures:
    """Of all requests of a run."""

    def __init__(self, tenants: Sequence[Tenant], targets: Targets, window_seconds: float) -> None:
        self.first_token = Histogram()
        self.token_gap = Histogram()
        self.whole_answer = Histogram()
        self.queue = Histogram()
        self.ended_count = 0
        self.good_count = 0
        self.failures: Counter[str] = Counter()
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.last_end = 0.0
        self.tenants = [TenantMeasures() for _ in tenants]
        self.fairness = Fairness([tenant.weight for tenant in tenants], window_seconds)
        self.served = [Series() for _ in tenants]
        self._targets = targets

    def arrived(self, request: Open, now: float) -> None:
        self.fairness.arrived(request.tenant, now)

    def placed(self, request: Open, cached_tokens: int, queue_seconds: float, now: float) -> None:
        """It holds blocks."""
        request.is_placed, request.cached_tokens = True, cached_tokens
        self.queue.add(queue_seconds)
        self.fairness.left(request.tenant, now)

    def tokens(self, request: Open, count: int, now: float) -> None:
        """So many tokens of its output came."""
        if request.output_tokens:
            self.token_gap.add((now - request.last_at) / count, count)
            served = count
        else:
            request.first_at = now
            seconds = now - request.arrived_at
            self.first_token.add(seconds)
            self.tenants[request.tenant].first_token.add(seconds)
            served = count + request.prompt_tokens - request.cached_tokens
        request.last_at = now
        request.output_tokens += count
        self.fairness.served(request.tenant, served, now)
        self.served[request.tenant].add(now, count)

    def ended(self, request: Open, failure: str, now: float) -> None:
        """It ended, well where `failure` is empty."""
        self.ended_count += 1
        self.last_end = max(self.last_end, now)
        if not request.is_placed:
            self.fairness.left(request.tenant, now)
        if failure:
            self.failures[failure] += 1
            return
        self.whole_answer.add(now - request.arrived_at)
        self.prompt_tokens += request.prompt_tokens
        self.cached_tokens += request.cached_tokens
        self.output_tokens += request.output_tokens
        tenant = self.tenants[request.tenant]
        tenant.requests += 1
        tenant.output_tokens += request.output_tokens
        self.good_count += self._is_good(request)

    def _is_good(self, request: Open) -> bool:
        targets, gaps = self._targets, request.output_tokens - 1
        first = request.first_at - request.arrived_at
        return (targets.first_token is None or first <= targets.first_token) and (
            targets.token_gap is None or gaps < 1 or (request.last_at - request.first_at) / gaps <= targets.token_gap
        )
