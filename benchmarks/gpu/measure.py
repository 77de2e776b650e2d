"""Clocks: seconds of what a device computes, with caches as they would be found."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Protocol

import torch

FLUSHED_BYTES = 256 << 20
"""More than any card's L2 holds."""
AHEAD_CYCLES = 2_000_000
"""About a millisecond: the host has all of a run launched before the device comes to it."""


class Clock(Protocol):
    def seconds(self, run: Callable[[], object]) -> float:
        """The median of several runs, each with a cold cache."""
        ...


class CudaClock:
    """Events around each run, launched while the device is still busy: what Python takes does not count.

    Before each, a buffer larger than the cache is read; had it been written, the run would share the memory with what
    the cache writes back.
    """

    def __init__(self, device: torch.device, runs: int = 20, warm_up: int = 3) -> None:
        self._buffer = torch.zeros(FLUSHED_BYTES // 8, dtype=torch.int64, device=device)
        self._runs, self._warm_up = runs, warm_up

    def seconds(self, run: Callable[[], object]) -> float:
        for _ in range(self._warm_up):
            run()
        spans = []
        for _ in range(self._runs):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(AHEAD_CYCLES)
            self._buffer.amax()
            start.record()
            run()
            end.record()
            spans.append((start, end))
        torch.cuda.synchronize()
        return median(start.elapsed_time(end) for start, end in spans) / 1e3


class OnceClock:
    """One run by the wall clock, where nothing depends on the figure."""

    def seconds(self, run: Callable[[], object]) -> float:
        started = time.perf_counter()
        run()
        return max(time.perf_counter() - started, 1e-9)


def wall_seconds(run: Callable[[], object], wait: Callable[[], object]) -> float:
    """Of one run by the wall clock, until `wait` returns."""
    wait()
    started = time.perf_counter()
    run()
    wait()
    return max(time.perf_counter() - started, 1e-9)
