"""How torch's threads wait for each other."""

from __future__ import annotations

import os

_SPINS = "1000"  # a few microseconds


def yield_soon() -> None:
    """Makes OpenMP's threads sleep after a short spin. To be called before torch is imported; a set variable wins.

    By default they spin for a millisecond and more. Beside any busy process that keeps the thread they wait for off
    its core: on two cores a step then takes ten to twenty times as long, and nothing is gained on a quiet machine.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
