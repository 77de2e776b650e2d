"""A small scenario drawn from a seed: executors with little memory, requests of all kinds, and what goes wrong when."""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass

from services.scheduler.policy import PolicyName

BLOCK_SIZE = 4
RESUME_SECONDS = 5.0
STALL_SECONDS = 1.5
LEASE_SECONDS = 1.0
SHORT_OUTAGE = 0.8
"""Seconds: with reconnections after it, well below what a request waits for."""
DRAIN_SECONDS = 1.5
"""What ends in order waits so long for what still runs."""


class FaultKind(enum.Enum):
    """What goes wrong."""

    DEATH = enum.auto()  # a process dies, and another one comes back after `seconds`
    DRAIN = enum.auto()  # an executor or the scheduler ends in order, as before a restart, and comes back
    CUT = enum.auto()  # one of its streams breaks: messages are lost, and each end learns of it in its own time
    FREEZE = enum.auto()  # it stands still for `seconds`; what arrives meanwhile waits
    SLOWNESS = enum.auto()  # an executor takes `factor` times as long for `seconds`
    LATENESS = enum.auto()  # what the next messages of a stream take longer, and hold up what follows
    CLOCK = enum.auto()  # its clock jumps forward by `seconds`


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong with one party."""

    at: float  # seconds
    kind: FaultKind
    party: str
    seconds: float
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ExecutorShape:
    """What one executor can hold and how fast it is."""

    blocks: int
    disk_blocks: int
    max_sequences: int
    max_step_tokens: int
    step_seconds: float
    token_seconds: float
    most_drafts: int  # of one sequence in a step; 0: it proposes none
    draft_quality: float  # how often one is right


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request of a client."""

    number: int
    at: float  # seconds
    gateway: int
    tenant: str
    weight: float
    prompt: tuple[int, ...]
    seed: int
    max_tokens: int
    ends: bool  # the end token ends it
    choices: int
    priority: int
    deadline: float | None  # seconds
    first_token: float | None  # seconds in which the client wants its first token
    stop_token: int | None  # what the gateway takes for a stop string
    cancel_after: float | None  # seconds after its arrival
    read_every: float | None  # seconds between reads of a slow client; None reads at once


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that happens, but for what the network draws on the way."""

    seed: int
    executors: tuple[ExecutorShape, ...]
    gateways: int
    lookahead: int
    step_tokens: int
    max_queued: int
    policy: PolicyName
    speculation: int | None  # drafts of every step; None: the scheduler chooses
    requests: tuple[Wanted, ...]
    faults: tuple[Fault, ...]

    @property
    def quiet_from(self) -> float:
        """Seconds: nothing goes wrong any more, and nothing more is asked."""
        ends = [fault.at + fault.seconds for fault in self.faults if fault.kind is not FaultKind.CLOCK]
        return max([request.at for request in self.requests] + ends)

    @property
    def may_give_up(self) -> bool:
        """Whether something is away for so long, or a clock goes so wrong, that requests may end for want of it."""
        return any(
            fault.kind is FaultKind.CLOCK or (fault.kind is not FaultKind.SLOWNESS and fault.seconds > SHORT_OUTAGE)
            for fault in self.faults
        )


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed)
    drafting = random.Random(f"drafts {seed}")
    executors = tuple(_executor(rng, drafting) for _ in range(rng.choice([1, 1, 2, 2, 3, 4])))
    gateways = rng.choice([1, 1, 2])
    parties = (
        tuple(f"executor-{index}" for index in range(len(executors))),
        tuple(f"gateway-{index}" for index in range(gateways)),
        ("scheduler",),
        ("kvmanager",),
    )
    smallest = min(shape.blocks for shape in executors) * BLOCK_SIZE
    requests = _requests(rng, gateways, smallest)
    last = requests[-1].at + 0.5
    faults = tuple(sorted((_fault(rng, parties, last) for _ in range(rng.choice([0, 1, 2, 3, 4]))), key=lambda f: f.at))
    return Scenario(
        seed,
        executors,
        gateways,
        lookahead=rng.choice([1, 4, 8, 16]),
        step_tokens=rng.choice([0, 0, 8, 16]),
        max_queued=rng.choice([1000, 1000, 1000, 6]),
        policy=rng.choice(["fair", "fair", "fair", "fcfs"]),
        speculation=drafting.choice([None, None, 0, 1, 3, 16]),
        requests=requests,
        faults=faults,
    )


def _executor(rng: random.Random, drafting: random.Random) -> ExecutorShape:
    return ExecutorShape(
        blocks=rng.choice([14, 20, 28, 40]),
        disk_blocks=rng.choice([0, 24, 48]),
        max_sequences=rng.choice([2, 4, 6]),
        max_step_tokens=rng.choice([16, 32]),
        step_seconds=rng.choice([0.004, 0.01]),
        token_seconds=rng.choice([0.0002, 0.001]),
        most_drafts=drafting.choice([0, 4, 16]),
        draft_quality=drafting.choice([0.0, 0.5, 0.9]),
    )


def _requests(rng: random.Random, gateways: int, slots: int) -> tuple[Wanted, ...]:
    """A few dozen at most, some of them sharing prefixes. Few can never fit."""
    stems = [tuple(rng.randint(1, 999) for _ in range(rng.randint(4, 20))) for _ in range(2)]
    flooder = rng.random() < 0.3
    at, wanted = 0.0, []
    for number in range(1, rng.randint(8, 20) + 1):
        at += rng.choice([0.0, 0.0, rng.expovariate(20)])
        stem = rng.choice(stems)[: rng.randint(0, 20)] if rng.random() < 0.6 else ()
        prompt = (*stem, *(rng.randint(1, 999) for _ in range(rng.randint(1, 20))))
        most = rng.choice([1, 4, 10, 24])
        if rng.random() > 0.02:
            most = max(1, min(most, slots - len(prompt)))
        tenant = "flood" if flooder and rng.random() < 0.7 else rng.choice(["a", "b"])
        wanted.append(
            Wanted(
                number=number,
                at=at,
                gateway=rng.randrange(gateways),
                tenant=tenant,
                weight={"a": 1.0, "b": 2.0, "flood": 1.0}[tenant],
                prompt=prompt,
                seed=rng.getrandbits(40),
                max_tokens=most,
                ends=rng.random() < 0.5,
                choices=rng.choice([1, 1, 1, 1, 2, 3]),
                priority=rng.choice([0, 0, 0, 5]),
                deadline=rng.choice([0.05, 0.3, 2.0]) if rng.random() < 0.15 else None,
                first_token=rng.choice([0.001, 0.1, 0.3]) if rng.random() < 0.2 else None,
                stop_token=rng.randint(1, 12) if rng.random() < 0.2 else None,
                cancel_after=rng.uniform(0, 0.6) if rng.random() < 0.12 else None,
                read_every=rng.choice([0.02, 0.2]) if rng.random() < 0.1 else None,
            )
        )
    return tuple(wanted)


def _fault(rng: random.Random, parties: Sequence[tuple[str, ...]], last: float) -> Fault:
    """With a party of `parties`, which are by role: each role is as likely as the others."""
    executors, _, scheduler, _ = parties
    kind = rng.choice([FaultKind.DEATH, FaultKind.DEATH, FaultKind.CUT, FaultKind.CUT, *FaultKind])
    party = rng.choice(rng.choice(parties))
    seconds = rng.uniform(0.0, SHORT_OUTAGE)
    if kind is FaultKind.SLOWNESS:
        party = rng.choice(executors)
        seconds = rng.uniform(0.1, 3.0)
    elif kind is FaultKind.DRAIN:
        party = rng.choice([*executors, *scheduler])
    elif kind is FaultKind.CLOCK:
        seconds = rng.choice([0.1, 3.0, 100.0])
    elif rng.random() < 0.08:
        seconds = rng.uniform(1.0, 1.6) * (RESUME_SECONDS + STALL_SECONDS)
    return Fault(rng.uniform(0.0, last), kind, party, seconds, rng.choice([3.0, 30.0]))
