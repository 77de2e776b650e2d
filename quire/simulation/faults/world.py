"""A scenario played: parties, streams and faults on one timeline, until all is quiet again and nothing is held."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

from quire.simulation.faults.executor import ExecutorParty
from quire.simulation.faults.gateway import GatewayParty
from quire.simulation.faults.invariants import (
    ClientChecks,
    ExecutorChecks,
    KvChecks,
    SchedulerChecks,
    Violation,
    require,
)
from quire.simulation.faults.kvmanager import KvManagerParty
from quire.simulation.faults.party import Party
from quire.simulation.faults.scenario import (
    DRAIN_SECONDS,
    LEASE_SECONDS,
    RESUME_SECONDS,
    STALL_SECONDS,
    Fault,
    FaultKind,
    Scenario,
)
from quire.simulation.faults.scheduler import SchedulerParty
from quire.simulation.faults.stream import Stream, Wires
from quire.simulation.timeline import Timeline
from services.common.errors import QuireError, Reason
from services.scheduler.policy import make_policy
from services.scheduler.state import Limits

START_SECONDS = 0.5
"""All parties are connected by then."""
BOUND_SECONDS = 60.0
"""Once nothing goes wrong any more, the last answer takes no longer."""
REST_SECONDS = LEASE_SECONDS + 6.0
"""After the last answer and late message, until nothing must be held any more: leases, and waits for what stands still,
run out."""
AGEING_SECONDS = 1.0
MOST_EVENTS = 400_000

Log = Callable[[float, str], None]


class World:
    """Plays one scenario. Deterministic: the same scenario gives the same events."""

    def __init__(self, scenario: Scenario, log: Log | None = None) -> None:
        """`log` hears of every event, with its time in seconds."""
        self.timeline = Timeline()
        self._scenario, self._log = scenario, log
        self._rng = random.Random(scenario.seed ^ 0x5EED)
        self._wires = Wires(self.timeline, self._rng, self._log_stream)
        self._clients = ClientChecks(scenario)
        self.kvmanager = KvManagerParty(self._wires, KvChecks())
        executor_checks = ExecutorChecks(scenario)
        self.executors = [
            ExecutorParty(self._wires, index, shape, self.kvmanager, executor_checks)
            for index, shape in enumerate(scenario.executors)
        ]
        limits = Limits(
            step_tokens=scenario.step_tokens,
            max_queued=scenario.max_queued,
            policy=make_policy(scenario.policy, AGEING_SECONDS),
            lookahead_tokens=scenario.lookahead,
            speculation=scenario.speculation,
            resume_seconds=RESUME_SECONDS,
            stall_seconds=STALL_SECONDS,
        )
        self.scheduler = SchedulerParty(self._wires, self.kvmanager, [*self.executors], limits, SchedulerChecks())
        self.gateways = [
            GatewayParty(self._wires, index, self.scheduler, self._clients) for index in range(scenario.gateways)
        ]
        parties: list[Party] = [self.kvmanager, *self.executors, self.scheduler, *self.gateways]
        self._parties = {party.name: party for party in parties}

    def play(self) -> dict[int, str]:
        """How each request ended. Raises Violation, and whatever breaks a core."""
        timeline, scenario = self.timeline, self._scenario
        for party in self._parties.values():
            party.begin()
        for wanted in scenario.requests:
            timeline.at(START_SECONDS + wanted.at, self.gateways[wanted.gateway].arrive, wanted)
        for fault in scenario.faults:
            timeline.at(START_SECONDS + fault.at, self._strike, fault)
        bound = START_SECONDS + scenario.quiet_from + BOUND_SECONDS
        events = 0
        outcomes = self._clients.outcomes
        while len(outcomes) < len(scenario.requests):
            if not len(timeline) or timeline.now > bound or events > MOST_EVENTS:
                open_ones = sorted({wanted.number for wanted in scenario.requests} - outcomes.keys())
                raise Violation(
                    f"requests {open_ones} hang {timeline.now - bound + BOUND_SECONDS:.0f} s after all faults"
                )
            timeline.advance()
            events += 1
        quiet_from = max(timeline.now, START_SECONDS + scenario.quiet_from)
        while len(timeline) and timeline.now <= max(quiet_from, self._wires.late_until) + REST_SECONDS:
            timeline.advance()
        self._check_rest()
        return outcomes

    # What happens

    def _strike(self, fault: Fault) -> None:
        party = self._parties[fault.party]
        if self._log is not None:
            self._log(
                self.timeline.now, f"FAULT {fault.kind.name} {fault.party} {fault.seconds:.3f} s x{fault.factor:g}"
            )
        if fault.kind is FaultKind.DEATH:
            self._kill(party, fault.seconds)
        elif not party.alive:
            return
        elif fault.kind is FaultKind.DRAIN:
            if isinstance(party, ExecutorParty | SchedulerParty):
                party.run(party.life, party.drain, DRAIN_SECONDS, functools.partial(self._kill, party, fault.seconds))
        elif fault.kind is FaultKind.CUT:
            streams = self._wires.of(party)
            if streams:
                self._rng.choice(streams).sever(QuireError(Reason.EXECUTOR_LOST, "the stream broke"))
        elif fault.kind is FaultKind.FREEZE:
            party.freeze(fault.seconds)
        elif fault.kind is FaultKind.LATENESS:
            for stream in self._wires.of(party):
                self._wires.delay_next(stream, fault.seconds)
        elif fault.kind is FaultKind.CLOCK:
            party.jump(fault.seconds)
        elif isinstance(party, ExecutorParty):
            party.slow_factors.append(fault.factor)
            self.timeline.at(self.timeline.now + fault.seconds, party.slow_factors.remove, fault.factor)

    def _kill(self, party: Party, seconds: float) -> None:
        if not party.alive:
            return
        party.die()
        for stream in self._wires.of(party):
            stream.abandon(party, QuireError(Reason.EXECUTOR_LOST, f"{party.name} is gone"))
        self.timeline.at(self.timeline.now + seconds, party.begin)

    # What must hold at the end

    def _check_rest(self) -> None:
        manager, state = self.kvmanager.manager, self.scheduler.state
        require(not state.request_ids and not state.live_count, "the scheduler has requests that nobody waits for")
        require(not state.asked, "the scheduler waits for reservations of nobody")
        for executor in state.executors:
            require(not executor.running and not executor.leaving, f"{executor.target}: sequences of nobody run")
            require(executor.asked_count == 0, f"{executor.target}: reservations of nobody are counted")
            require(executor.expected_tokens == 0, f"{executor.target}: tokens of nobody are expected")
        for party in self.executors:
            require(not party.core.sequences, f"{party.name} computes for nobody")
        require(manager.sequence_count == 0, f"the kvmanager holds {manager.sequence_count} sequences of nobody")
        require(not len(manager.waiting), "reservations of nobody wait at the kvmanager")
        for name, known in manager.executors.items():
            leased = [pool.blocks.leased_count for pool in known.pools]
            require(not any(leased), f"blocks of nobody are held on {name}: {leased}")

    def _log_stream(self, stream: Stream, side: int, message: Any) -> None:
        if self._log is not None:
            text = str(message).replace("\n", " ")
            self._log(self.timeline.now, f"{stream.name} to {stream.parties[side].name}: {text}")
