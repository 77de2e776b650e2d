"""Which failures are worth another attempt, how soon, and how many attempts at most. Pure."""

from __future__ import annotations

import random

import grpc

from services.common.errors import QuireError, Reason

MOST_ATTEMPTS = 2
"""Further ones of a request."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
SHARE, RESERVE = 0.1, 10.0
"""Attempts beside first ones, in the long run, and how many may come at once."""


def is_unavailable(error: QuireError) -> bool:
    """Whether the scheduler says that it cannot serve now, and not that the request is at fault."""
    return error.reason.value.code is grpc.StatusCode.UNAVAILABLE


def is_failure(error: QuireError) -> bool:
    """Whether an error speaks against the scheduler that sent it."""
    code = error.reason.value.code
    return code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL) or error.reason is Reason.PROTOCOL


def pause(attempt: int, rng: random.Random) -> float:
    """Seconds before attempt 1, 2, ...: anywhere up to a bound that doubles, so that they do not come together."""
    return rng.uniform(0.0, min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (attempt - 1)))


class RetryBudget:
    """Bounds further attempts by the number of first ones: where all fail, retries must not double the load."""

    def __init__(self, share: float = SHARE, reserve: float = RESERVE) -> None:
        self._share, self._reserve = share, reserve
        self._left = reserve

    def earn(self) -> None:
        """A first attempt was made."""
        self._left = min(self._reserve, self._left + self._share)

    def spend(self) -> bool:
        """Whether one more attempt may be made; it is taken from the budget."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
