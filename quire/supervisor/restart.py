"""When a service that died is started again, and when that is given up: pure decisions."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

REFUSED_SETTINGS = 2
"""Exit status of a service whose settings or model are wrong: the next try would say the same."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Delays in seconds. A run of failures is over once a service stayed healthy for `calm_seconds`."""

    first_delay: float = 0.5
    factor: float = 2.0
    longest_delay: float = 30.0
    calm_seconds: float = 30.0
    start_attempts: int = 3


@dataclass(frozen=True, slots=True)
class History:
    """What is known of one service's lives in this run."""

    failures: int = 0
    """Consecutive deaths, the last one included."""
    ever_healthy: bool = False

    def after_death(self, healthy_seconds: float | None, policy: RestartPolicy) -> History:
        """The history after one more death; `healthy_seconds` is how long that life was healthy, None for never."""
        calm = healthy_seconds is not None and healthy_seconds >= policy.calm_seconds
        return replace(
            self,
            failures=1 if calm else self.failures + 1,
            ever_healthy=self.ever_healthy or healthy_seconds is not None,
        )


@dataclass(frozen=True, slots=True)
class Restart:
    """Start again after `delay` seconds."""

    delay: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not start again."""

    why: str


def decide(history: History, exit_status: int, policy: RestartPolicy) -> Restart | GiveUp:
    """What follows an end. A service that once was healthy is started again for ever, ever more slowly.

    One that was asked to end, and drained, is not failing: that is how it is restarted in order.
    """
    if exit_status == 0 and history.ever_healthy:
        return Restart(policy.first_delay)
    if exit_status == REFUSED_SETTINGS and not history.ever_healthy:
        return GiveUp("it refused its settings or model")
    if not history.ever_healthy and history.failures >= policy.start_attempts:
        return GiveUp(f"it ended {history.failures} times before it was ever healthy")
    # The exponent is bounded, so that a service dying for days overflows nothing.
    exponent = min(history.failures - 1, 64)
    return Restart(min(policy.first_delay * policy.factor**exponent, policy.longest_delay))


def describe_exit(status: int) -> str:
    """An exit status as asyncio reports it, in words: negative ones are signals."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
