"""What Quire has to reach, and how each of it follows from the samples. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.peers.samples import BOUND, OURS, Sample, hardest


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result. `values` are of single rounds; their median is compared."""

    title: str
    bar: float
    aim: float
    values: tuple[float, ...]
    unit: str = "x"
    less_is_better: bool = False

    @property
    def measured(self) -> float:
        return median(self.values)

    @property
    def verdict(self) -> str:
        sign = -1.0 if self.less_is_better else 1.0
        if sign * self.measured >= sign * self.aim:
            return "aim met"
        return "met" if sign * self.measured >= sign * self.bar else "missed"


@dataclass(frozen=True, slots=True)
class Bar:
    """A comparison with the best of those `peers` that were measured."""

    title: str
    suite: str
    figure: str
    bar: float
    aim: float
    peers: Callable[[str], bool]
    less_is_better: bool = False

    def row(self, samples: Sequence[Sample]) -> Row | None:
        """None where nothing of this was measured."""
        own = [sample for sample in samples if sample.suite == self.suite]
        peers = sorted({s.contestant for s in own if self.peers(s.contestant)})
        values = hardest(own, self.figure, peers, max if self.less_is_better else min)
        if not values:
            return None
        return Row(self.title, self.bar, self.aim, tuple(values), less_is_better=self.less_is_better)


def rows(samples: Sequence[Sample]) -> list[Row]:
    """Every line for which there are samples."""
    found = [bar.row(samples) for bar in BARS]
    found += [_memory(samples, side, bar, aim) for side, bar, aim in (("below", 0.75, 0.88), ("above", 0.55, 0.70))]
    found.append(_newcomer(samples))
    return [row for row in found if row is not None]


def _memory(samples: Sequence[Sample], side: str, bar: float, aim: float) -> Row | None:
    figure = f"share {side} 40 GB/s"
    values = [s.figures[figure] for s in samples if s.suite == "memory" and figure in s.figures]
    title = f"decode, batch 1, against a plain read of the same bytes, read {side} 40 GB/s"
    return Row(title, bar, aim, tuple(values)) if values else None


def _newcomer(samples: Sequence[Sample]) -> Row | None:
    """Bars of two steps and 5 ms, one step and 3 ms; a step is as long as the engine alone takes for it."""
    found = [s.figures for s in samples if s.suite == "newcomer"]
    if not found:
        return None
    step = median(figures["step ms"] for figures in found)
    values = tuple(figures["first token ms"] - figures["engine's own ms"] for figures in found)
    title = "first token of a new request beside 8 running, over the engine's own"
    return Row(title, 2 * step + 5, step + 3, values, unit="ms", less_is_better=True)


def _beside(*names: str) -> Callable[[str], bool]:
    return lambda contestant: contestant in names


def _peer(contestant: str) -> bool:
    return contestant not in (OURS, BOUND)


def _served(api: str, at_once: int, against: str, bar: float, aim: float, peers: Callable[[str], bool]) -> Bar:
    title = f"served over {api}, {at_once} at once, against {against}"
    return Bar(title, "serve", f"{api} output tok/s @{at_once}", bar, aim, peers)


BARS = (
    Bar("decode, batch 1, against llama.cpp Q4_0", "engine", "decode 1", 1.6, 2.1, _beside("llama.cpp Q4_0")),
    Bar("decode, batch 1, against llama.cpp, same file", "engine", "decode 1", 2.3, 3.0, _beside("llama.cpp Q4_1")),
    Bar("decode, batch 32, against the best engine", "engine", "decode 32", 2.0, 2.6, _peer),
    Bar("prefill of 512 tokens, against the best engine", "engine", "prefill 512", 1.15, 1.35, _peer),
    _served("http", 1, "the best server", 1.8, 2.6, _peer),
    _served("http", 8, "the best server", 2.0, 2.6, _peer),
    _served("http", 32, "the best server", 1.5, 1.75, _peer),
    Bar(
        "p99 gap between messages, http, 32 at once", "serve", "http gap p99 @32", 0.8, 0.5, _peer, less_is_better=True
    ),
    _served("grpc", 1, "the engine bound", 0.80, 0.90, _beside(BOUND)),
    _served("grpc", 8, "the engine bound", 0.82, 0.90, _beside(BOUND)),
    _served("grpc", 32, "the engine bound", 0.87, 0.94, _beside(BOUND)),
    Bar("speed kept beside a busy process", "neighbour", "kept", 1.0, 1.0, _beside("llama.cpp Q4_0")),
)
