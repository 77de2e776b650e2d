"""Rounds of measurements with contestants that only pretend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from benchmarks.peers.contestants import EngineLoad
from benchmarks.peers.drivers.rates import rates
from benchmarks.peers.processes import PeerError
from benchmarks.peers.samples import OURS, Measured, Record
from benchmarks.peers.suites import alternate, busy_neighbour, engines

LOAD = EngineLoad(batches=(1, 8))


@dataclass
class Pretender:
    """An engine whose batch-1 rates are given in advance."""

    name: str
    rates: list[float]
    loads: list[EngineLoad] = field(default_factory=list)

    def measure(self, load: EngineLoad) -> Measured:
        self.loads.append(load)
        return Measured({"decode 1": self.rates.pop(0)}, {"version": "1"})


def test_rounds_alternate_and_keep_every_measurement() -> None:
    record = Record()
    ours, peer = Pretender(OURS, [1.0, 2.0, 3.0, 4.0]), Pretender("peer", [10.0, 20.0])
    alternate("engine", engines([ours, peer], LOAD), 2, record)
    found = [(s.round, s.contestant, s.figures["decode 1"]) for s in record.samples]
    assert found[:3] == [(0, OURS, 1.0), (0, "peer", 10.0), (0, OURS, 2.0)]
    assert found[3:] == [(1, OURS, 3.0), (1, "peer", 20.0), (1, OURS, 4.0)]
    assert record.facts == {OURS: {"version": "1"}, "peer": {"version": "1"}}


def test_a_busy_neighbour_is_there_for_the_second_measurement_only() -> None:
    record = Record()
    ours = Pretender(OURS, [400.0, 200.0])
    alternate("neighbour", busy_neighbour([ours], LOAD), 1, record)
    assert record.samples[0].figures == {"quiet": 400.0, "busy": 200.0, "kept": 0.5}
    assert [load.batches for load in ours.loads] == [(1,), (1,)]


def test_output_that_nobody_understands_names_the_contestant() -> None:
    def fail(number: int) -> Measured:
        raise ValueError("no line of JSON")

    record = Record()
    suite: dict[str, Callable[[int], Measured]] = {OURS: lambda number: Measured({"decode 1": 1.0}), "peer": fail}
    with pytest.raises(PeerError, match="peer: no line of JSON"):
        alternate("engine", suite, 1, record)
    assert [sample.contestant for sample in record.samples] == [OURS]


def test_drivers_take_decoding_from_the_difference_of_two_runs() -> None:
    durations = {(2, 16, 2): [9.0], (2, 16, 1): [0.5, 0.4], (2, 16, 5): [1.4, 2.0], (1, 64, 1): [9.0, 0.3, 0.2]}

    def seconds(batch: int, prompt: int, new: int) -> float:
        return durations[batch, prompt, new].pop(0)

    load = {"batches": [2], "prompt": 16, "output": 5, "prefill": 64, "repeat": 2}
    found = rates(seconds, load)
    assert found == pytest.approx({"prefill 2x16": 32 / 0.4, "decode 2": 8 / (1.4 - 0.4), "prefill 64": 320.0})


def test_drivers_leave_out_what_noise_hides() -> None:
    load = {"batches": [2], "prompt": 16, "output": 5, "prefill": 64, "repeat": 1}
    assert "decode 2" not in rates(lambda batch, prompt, new: 1.0, load)
