"""What is left of a caller's rates, as answers tell it: OpenAI's x-ratelimit headers, the same over gRPC. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.quota.bucket import full, units
from services.gateway.quota.ledger import Levels
from services.gateway.quota.limits import Subject


def rate_headers(subjects: Sequence[Subject], levels: Sequence[Levels]) -> dict[str, str]:
    """Of each kind of rate, the subject that has least left."""
    headers: dict[str, str] = {}
    both = list(zip(subjects, levels, strict=True))
    requests = [(one.rates.requests_per_minute, level.requests) for one, level in both]
    tokens = [(one.rates.tokens_per_minute, level.tokens) for one, level in both]
    for kind, found in (("requests", requests), ("tokens", tokens)):
        limited = [(level, rate) for rate, level in found if rate is not None]
        if limited:
            level, rate = min(limited)
            headers[f"x-ratelimit-limit-{kind}"] = str(rate)
            headers[f"x-ratelimit-remaining-{kind}"] = str(units(level))
            headers[f"x-ratelimit-reset-{kind}"] = f"{-((level - full(rate)) // rate) / 1000:.3f}s"
    return headers
