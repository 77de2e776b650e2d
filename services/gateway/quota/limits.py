"""What a tenant or a key may ask for. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.common.errors import QuireError, Reason, invalid

MAX_PER_MINUTE = 10**9


@dataclass(frozen=True, slots=True)
class Rates:
    """Limits that are counted over requests; None is none."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None

    def __bool__(self) -> bool:
        limits = (self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests)
        return any(limit is not None for limit in limits)


@dataclass(frozen=True, slots=True)
class Subject:
    """A tenant or a key whose requests are counted. Subjects of one request are of one tenant."""

    tenant: str
    key: str  # empty for the tenant's own count
    rates: Rates

    def __str__(self) -> str:
        return f"key {self.key}" if self.key else f"tenant {self.tenant!r}"


@dataclass(frozen=True, slots=True)
class Caps:
    """Limits on each request alone; None is none."""

    context_tokens: int | None = None  # prompt and output together
    output_tokens: int | None = None  # of each choice
    models: frozenset[str] | None = None  # names that may be asked for
    queue_share: float | None = None  # of the scheduler's queue, that the tenant may fill, in (0, 1]

    def allows(self, model: str) -> bool:
        return self.models is None or model in self.models

    def check_output(self, field: str, tokens: int) -> None:
        """INVALID_FIELD where more output is asked for than may be."""
        if self.output_tokens is not None and tokens > self.output_tokens:
            raise invalid(field, f"{tokens} is above {self.output_tokens}, the most of this API key")

    def context(self, of_model: int) -> int:
        """The most tokens of prompt and output."""
        return of_model if self.context_tokens is None else min(of_model, self.context_tokens)


NO_CAPS = Caps()


def strictest(caps: Iterable[Caps]) -> Caps:
    """What is allowed by all of them."""
    listed = list(caps)
    models = [one.models for one in listed if one.models is not None]
    return Caps(
        min((one.context_tokens for one in listed if one.context_tokens is not None), default=None),
        min((one.output_tokens for one in listed if one.output_tokens is not None), default=None),
        frozenset.intersection(*models) if models else None,
        min((one.queue_share for one in listed if one.queue_share is not None), default=None),
    )


def check_fits(subjects: Iterable[Subject], tokens: int) -> None:
    """TOO_LARGE where a request needs more tokens than a minute ever has."""
    for subject in subjects:
        most = subject.rates.tokens_per_minute
        if most is not None and tokens > most:
            what = f"tokens_per_minute: prompt and max_tokens are {tokens} tokens, above the {most} of {subject}"
            raise QuireError(Reason.TOO_LARGE, what)
