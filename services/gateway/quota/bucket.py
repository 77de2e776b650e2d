"""Token buckets in whole numbers, so that every implementation agrees to the last unit. Pure.

A bucket holds one minute's worth at most and is full at first. Its level counts in ticks, of which one unit has 60,000:
a rate of R units a minute then adds exactly R ticks each millisecond. What is charged beyond zero is debt, which delays
what comes next.
"""

from __future__ import annotations

TICKS = 60_000


def full(per_minute: int) -> int:
    """The level of a full bucket."""
    return per_minute * TICKS


def refilled(level: int, per_minute: int, elapsed_ms: int) -> int:
    """The level after some time."""
    return min(full(per_minute), level + per_minute * elapsed_ms)


def wait_ms(level: int, per_minute: int, amount: int) -> int:
    """Milliseconds until that many units are there; 0 where they are. `amount` is at most one minute's worth."""
    return max(0, -((level - amount * TICKS) // per_minute))


def units(level: int) -> int:
    """Whole units that can be taken."""
    return max(0, level) // TICKS
