"""How torch's threads wait for each other."""

from __future__ import annotations

import os

_SPINS = "10000"  # tens of microseconds


def yield_soon() -> None:
    """Makes OpenMP's threads sleep after a short spin. To be called before torch is imported; a set variable wins.

    By default they spin for a millisecond and more. Beside a busy process that keeps the thread they wait for off its
    core, a step on two cores then took 4 s instead of 0.07 s; with this, 0.2 s, and nothing is lost on a quiet machine.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
