"""Streams that break and parties that stand still, as the scenarios of faults need them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from quire.simulation.faults.party import Party
from quire.simulation.faults.scenario import SHORT_OUTAGE, FaultKind, draw
from quire.simulation.faults.stream import CLIENT, SERVER, End, Stream, Wires
from quire.simulation.faults.truth import answer, next_token
from quire.simulation.timeline import Timeline
from services.common.errors import QuireError, Reason

GONE = QuireError(Reason.EXECUTOR_LOST, "gone")


@dataclass
class Ear:
    """One end that remembers."""

    heard: list[Any] = field(default_factory=list)
    ends: list[QuireError] = field(default_factory=list)

    def received(self, stream: Stream, message: Any) -> None:
        self.heard.append(message)

    def closed(self, stream: Stream, error: QuireError) -> None:
        self.ends.append(error)


class Process(Party):
    """One that only listens."""

    ear: Ear

    def start(self) -> None:
        self.ear = Ear()

    def accept(self, kind: str, stream: Stream) -> End:
        return self.ear


class Pair:
    """A client and a server with one stream between them."""

    def __init__(self, seed: int = 0) -> None:
        self.timeline = Timeline()
        self.wires = Wires(self.timeline, random.Random(seed), lambda stream, side, message: None)
        self.client, self.server = Process(self.timeline, "client"), Process(self.timeline, "server")
        self.client.begin()
        self.server.begin()
        self.stream = self.wires.open("Talk", self.client, self.client.ear, self.server)

    def run(self) -> None:
        while len(self.timeline):
            self.timeline.advance()


def test_a_stream_keeps_order_and_what_is_late_holds_up_what_follows() -> None:
    pair = Pair()
    pair.wires.delay_next(pair.stream, 1.0)
    for number in range(5):
        pair.stream.send(CLIENT, number)
    pair.run()
    assert pair.server.ear.heard == [0, 1, 2, 3, 4]
    assert pair.timeline.now > 1.0


def test_lateness_lasts_until_what_is_sent_next_has_arrived() -> None:
    """However long the stream is silent before."""
    pair = Pair()
    pair.wires.delay_next(pair.stream, 1.0)
    pair.timeline.at(5.0, pair.stream.send, CLIENT, "late")
    pair.timeline.advance()
    assert not pair.server.ear.heard
    late_until = pair.wires.late_until
    assert late_until > 6.0
    pair.run()
    assert (pair.server.ear.heard, pair.timeline.now) == (["late"], late_until)
    pair.stream.send(CLIENT, "in time")
    assert pair.wires.late_until == late_until


@pytest.mark.parametrize("seed", range(12))
def test_a_broken_stream_loses_a_tail_and_both_ends_learn_of_it(seed: int) -> None:
    pair = Pair(seed)
    for number in range(3):
        pair.stream.send(CLIENT, number)
    pair.timeline.advance()
    pair.stream.sever(GONE)
    pair.stream.send(CLIENT, 3)
    pair.run()
    heard = pair.server.ear.heard
    assert heard in ([0], [0, 1, 2])
    assert (pair.client.ear.ends, pair.server.ear.ends) == ([GONE], [GONE])
    assert pair.stream.is_over


def test_both_fates_of_what_is_under_way_are_met() -> None:
    heard = set()
    for seed in range(12):
        pair = Pair(seed)
        pair.stream.send(CLIENT, "x")
        pair.stream.sever(GONE)
        pair.run()
        heard.add(len(pair.server.ear.heard))
    assert heard == {0, 1}


def test_an_end_that_closes_hears_nothing_more() -> None:
    pair = Pair()
    pair.stream.send(SERVER, "late")
    pair.stream.close(CLIENT, GONE)
    pair.run()
    assert pair.client.ear.heard == pair.client.ear.ends == []
    assert pair.server.ear.ends == [GONE]


def test_a_dead_process_hears_nothing_and_its_peer_learns_of_it() -> None:
    pair = Pair()
    pair.stream.send(CLIENT, "x")
    ear = pair.server.ear
    pair.server.die()
    pair.stream.abandon(pair.server, GONE)
    pair.server.begin()
    pair.run()
    assert ear.heard == pair.server.ear.heard == []
    assert pair.client.ear.ends == [GONE]


def test_nobody_listens_where_no_process_is() -> None:
    pair = Pair()
    pair.server.die()
    ear = Ear()
    pair.wires.open("Talk", pair.client, ear, pair.server)
    pair.run()
    assert len(ear.ends) == 1


def test_what_reaches_a_party_that_stands_still_waits_in_order() -> None:
    pair = Pair()
    pair.server.freeze(2.0)
    pair.server.after(0.5, pair.server.ear.heard.append, "timer")
    pair.stream.send(CLIENT, "message")
    while pair.timeline.now < 1.9 and len(pair.timeline):
        pair.timeline.advance()
        assert pair.server.ear.heard == [] or pair.timeline.now >= 2.0
    pair.run()
    assert pair.server.ear.heard == ["message", "timer"]


def test_timers_go_by_a_partys_own_clock() -> None:
    pair = Pair()
    rang: list[tuple[str, float]] = []
    pair.client.after(10.0, lambda: rang.append(("far", pair.timeline.now)))
    pair.client.after(100.0, lambda: rang.append(("farther", pair.timeline.now)))
    pair.client.jump(30.0)
    pair.run()
    assert [name for name, _ in rang] == ["far", "farther"]
    assert rang[0][1] < 0.1
    assert rang[1][1] == pytest.approx(70.0)


def test_a_new_process_does_nothing_that_the_last_one_meant_to() -> None:
    pair = Pair()
    rang: list[str] = []
    pair.client.after(1.0, rang.append, "old")
    pair.client.die()
    pair.client.begin()
    pair.client.after(1.0, rang.append, "new")
    pair.run()
    assert rang == ["new"]


def test_a_token_depends_on_every_token_before_it_and_on_seed_and_choice() -> None:
    context = list(range(1, 40))
    token = next_token(context, 7, 0)
    changed = [next_token([*context[:at], 999, *context[at + 1 :]], 7, 0) for at in range(len(context))]
    assert sum(other == token for other in changed) <= 1
    assert len({next_token(context, seed, choice) for seed in range(5) for choice in range(5)}) > 20
    assert answer(context, 7, 0, 9, ends=False)[:1] == [token]


def test_scenarios_are_what_they_say() -> None:
    """Equal for equal seeds, with everything that can go wrong and most of it short enough to be survived."""
    scenarios = [draw(seed) for seed in range(300)]
    assert scenarios[:20] == [draw(seed) for seed in range(20)]
    faults = [fault for scenario in scenarios for fault in scenario.faults]
    assert {fault.kind for fault in faults} == set(FaultKind)
    roles = {fault.party.partition("-")[0] for fault in faults}
    assert roles == {"executor", "gateway", "scheduler", "kvmanager"}
    deaths = [fault.seconds for fault in faults if fault.kind is FaultKind.DEATH]
    assert sum(seconds <= SHORT_OUTAGE for seconds in deaths) > 0.8 * len(deaths)
    assert any(any(shape.disk_blocks for shape in scenario.executors) for scenario in scenarios)
