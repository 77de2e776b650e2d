"""Everything the scheduler knows: executors, models, gateways, queues, and what is still to be said to whom."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from quire.v1 import executor_pb2, scheduler_pb2, types_pb2
from services.scheduler.aliases import Alias
from services.scheduler.decisions import Admission, Decisions
from services.scheduler.fairness import Ledger
from services.scheduler.heap import LazyHeap
from services.scheduler.pace import StepTime, TierRate
from services.scheduler.policy import Infeasible, Policy, fair
from services.scheduler.predict import LengthPredictor, QuantilePredictor
from services.scheduler.queue import WaitingQueue
from services.scheduler.sequence import Request, Sequence
from services.scheduler.slowness import SOUND, Pace, Slowness
from services.scheduler.speculation.controller import Controller
from services.scheduler.speculation.tally import Tally
from services.scheduler.stays import Leaving

TARGET_GROUP = 0  # the cache group of the model itself
UNLIMITED = 1 << 30
ADMISSIONS = 64
"""The latest of one model are remembered, with their reasons."""
RATE_SECONDS = 5.0
"""Span over which output tokens per second are counted."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The settings that decisions depend on."""

    step_tokens: int = 0  # 0: the executor's own limit
    max_queued: int = 4096
    max_queued_tenant: int = 2048
    policy: Policy = field(default_factory=fair)
    infeasible: Infeasible = "last"
    output_cost: float = 2.0  # of an output token beside one of a prompt
    grant_seconds: float = 0.020
    gap_seconds: float = 0.150  # of a step that prefills beside sequences which decode, at most
    gap_stretch: float = 2.5  # such a step takes so many times what it takes without prefill, at most
    lookahead_tokens: int = 64
    speculation: int | None = None  # drafts of every step; None chooses them by what they give
    resume_seconds: float = 30.0
    stall_seconds: float = 60.0


@dataclass(slots=True)
class Counters:
    """Totals of one model on one executor, for metrics."""

    preemptions: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    drafts: Tally = field(default_factory=Tally)


@dataclass(slots=True, eq=False, repr=False)
class Executor:
    """One executor, its sequences, and what its next plan shall carry."""

    index: int  # counts executors as they came; never used again
    target: str
    description: types_pb2.ExecutorDescription | None = None
    executor_id: str = ""
    model: types_pb2.ModelDescription | None = None  # the loaded one, if any
    model_name: str = ""  # of that one
    fingerprint: str = ""  # of its weights
    max_sequences: int = 0  # in a step
    block_size: int = 0  # token slots per block of the target model's group
    epoch: int = 0
    connected: bool = False
    stream_failure: str = ""  # why the stream must be opened again; empty while it is sound
    retired: bool = False  # somebody asked for it: nothing is placed here until it is added again
    ends_at: float | None = None  # seconds: its process said that it ends by then
    counters: Counters = field(default_factory=Counters)

    # Streams: plans out, results in.
    step: int = 0  # the last plan sent
    acknowledged_results: int = 0
    report_credit: int = 0  # as last sent
    grant_steps: int = 2  # G
    step_seconds: float = 0.0  # of the sequences that decode now, without prefill; as stated until measured
    step_time: StepTime = field(default_factory=StepTime)
    tier_rate: TierRate = field(default_factory=TierRate)
    speculation: Controller | None = None  # None: drafts are not proposed here, or not wanted
    drafts_per_step: float = 0.0  # as measured
    pace: Pace = field(default_factory=Pace)
    slowness: Slowness = SOUND

    # Sequences. Each is in `running`, and either in `prefilling` or in `decoding`.
    running: dict[int, Sequence] = field(default_factory=dict)
    entering: dict[int, Sequence] = field(default_factory=dict)  # placed, in no plan yet
    prefilling: dict[int, Sequence] = field(default_factory=dict)  # known tokens are left to grant
    decoding: dict[int, Sequence] = field(default_factory=dict)
    chunking: dict[int, Sequence] = field(default_factory=dict)  # those of `decoding` whose last chunk is unanswered
    capped: dict[int, Sequence] = field(default_factory=dict)  # those of `decoding` that may have few unanswered steps
    starved: dict[int, Sequence] = field(default_factory=dict)  # refused more blocks
    leaving: dict[int, Leaving] = field(default_factory=dict)  # by stay; blocks wait for the executor's answer

    # What the next plan carries.
    ended_ids: list[int] = field(default_factory=list)
    appends: dict[int, list[executor_pb2.BlockList]] = field(default_factory=dict)
    sealed: list[executor_pb2.SealedBlock] = field(default_factory=list)
    operations: list[executor_pb2.BlockOperation] = field(default_factory=list)
    copies: list[executor_pb2.BlockOperation] = field(default_factory=list)  # what forks do not share
    demotions: list[executor_pb2.BlockDemotion] = field(default_factory=list)
    top_up_due: bool = False  # all sequences get new credit
    small_top_up_due: bool = False  # only capped and prefilling ones do

    available_blocks: int | None = None  # as last announced by the kvmanager, less what was asked for since
    coming_blocks: int = 0  # that will be available once their content is in a lower tier
    coming_at: float = 0.0  # seconds: when that number changed last
    asked_count: int = 0  # reservations that may still land here
    has_space: bool = False  # blocks appeared: starved sequences ask again
    total_blocks: int = 0
    output_marks: deque[tuple[float, int]] = field(default_factory=deque)  # (seconds, output tokens)
    expected_tokens: int = 0  # of output that its sequences still have before them, as predicted
    target_gaps: Counter[float] = field(default_factory=Counter)  # seconds that running sequences aim at

    def describe(self, description: types_pb2.ExecutorDescription, speculation: int | None = None) -> None:
        """Takes in what it says of itself: what it took for its steps before is of no use any more."""
        self.description, self.executor_id = description, description.executor_id
        self.model = description.model if description.HasField("model") else None
        self.model_name = self.model.name if self.model is not None else ""
        self.fingerprint = self.model.fingerprint if self.model is not None else ""
        self.max_sequences = description.max_sequences
        self.block_size = next((g.block_size for g in description.groups if g.group_id == TARGET_GROUP), 0)
        self.step_time, self.tier_rate = StepTime.stated(description), TierRate()
        self.step_seconds = self.step_time.step(1)
        wanted = description.HasField("speculation") and speculation != 0
        self.speculation, self.drafts_per_step = Controller(description, speculation) if wanted else None, 0.0

    @property
    def serves(self) -> bool:
        return self.connected and self.model is not None

    @property
    def draining(self) -> bool:
        return self.retired or self.ends_at is not None

    @property
    def takes(self) -> bool:
        """Whether sequences may be placed here."""
        return self.connected and self.model is not None and not self.retired and self.ends_at is None

    @property
    def free_sequences(self) -> int:
        """How many more it computes beside what runs there and what is asked for."""
        return self.max_sequences - len(self.running) - self.asked_count

    def blocks_of(self, tokens: int) -> int:
        """Blocks of the target model's group that so many tokens take."""
        return -(-tokens // self.block_size)

    @property
    def gap_target(self) -> float | None:
        """Seconds between tokens that the most demanding running sequence aims at; None where none does."""
        return min(self.target_gaps, default=None)

    def output_rate(self, now: float) -> float:
        """Output tokens per second over the last seconds."""
        return sum(count for at, count in list(self.output_marks) if now - at <= RATE_SECONDS) / RATE_SECONDS


@dataclass(slots=True, eq=False, repr=False)
class Model:
    """A model that can be asked for; it outlives its last executor for a while."""

    description: types_pb2.ModelDescription
    queue: WaitingQueue
    ledger: Ledger
    admissions: deque[Admission] = field(default_factory=lambda: deque(maxlen=ADMISSIONS))
    lost_at: float | None = None  # since when no executor serves it
    window: int = UNLIMITED  # the most reservations in flight: 0 after a refusal, 1 to try again, then unlimited
    refusal: str = ""  # what the kvmanager said, while that lasts
    asked_count: int = 0  # reservations in flight
    retry_at: float | None = None  # when to try again although nothing was heard
    unplaced_since: float | None = None  # since when the kvmanager knows no executor for it


@dataclass(slots=True, eq=False, repr=False)
class Gateway:
    """One gateway's stream."""

    gateway_id: str
    requests: dict[int, Request] = field(default_factory=dict)  # by handle
    open: bool = True
    has_output: bool = False
    outbox: scheduler_pb2.ServeResponse = field(default_factory=scheduler_pb2.ServeResponse)  # all but tokens
    outputs: list[tuple[int, int, int, list[int]]] = field(default_factory=list)  # handle, choice, position, new tokens

    def say_tokens(self, handle: int, choice: int, position: int, token_ids: list[int]) -> None:
        """Adds tokens of one choice from that output position on."""
        self.has_output = True
        self.outputs.append((handle, choice, position, token_ids))

    def take_output(self) -> scheduler_pb2.ServeResponse:
        """All that happened since the last one, as one message."""
        message = self.outbox
        if self.outputs:
            handles, choices, positions, tokens = zip(*self.outputs, strict=True)
            message.handles.extend(handles)
            message.choices.extend(choices)
            message.positions.extend(positions)
            message.token_counts.extend(map(len, tokens))
            message.token_ids.extend(itertools.chain.from_iterable(tokens))
            self.outputs = []
        self.outbox, self.has_output = scheduler_pb2.ServeResponse(), False
        return message


@dataclass(slots=True)
class Asked:
    """A reservation that the kvmanager has not answered."""

    sequence: Sequence | None  # None: abandoned meanwhile, what is granted goes straight back
    model: Model
    executors: dict[str, tuple[Executor, int]]  # by id: the executor and the epoch it had
    why: str  # it was next
    is_fork: bool = False  # it was to continue another one where that runs


class State:
    """The scheduler's whole state. Changed by the core's functions only; holds no sockets and reads no clock."""

    def __init__(
        self,
        targets: tuple[str, ...],
        limits: Limits,
        first_sequence_id: int = 1,
        *,
        aliases: tuple[Alias, ...] = (),
        predictor: LengthPredictor | None = None,
    ) -> None:
        self.limits = limits
        self.executors = [Executor(index, target) for index, target in enumerate(targets)]
        self.executor_numbers: Iterator[int] = itertools.count(len(targets))
        self.slowness_due_at = 0.0  # seconds: when to compare executors again
        self.models: dict[str, Model] = {}
        self.aliases = aliases
        self.offered_aliases: dict[str, tuple[Alias, types_pb2.ModelDescription]] = {}
        self.alias_problems: list[str] = []
        self.predictor: LengthPredictor = predictor if predictor is not None else QuantilePredictor()
        self.gateways: list[Gateway] = []
        self.request_ids: dict[tuple[str, str], Request] = {}  # by tenant and request id
        self.orphans: dict[tuple[str, str], Request] = {}  # without a gateway, by tenant and request id; some ended
        self.orphan_ends: LazyHeap[tuple[float, int], Request] = LazyHeap(lambda request: request.kept_until is None)
        self.touched: dict[Executor, None] = {}  # those that something happened to since the last turn, in order
        self.may_admit = True  # something happened that may let a waiting sequence in
        self.running: dict[int, Sequence] = {}  # by stay: those with blocks, on whatever executor
        self.live_counts: Counter[str] = Counter()  # sequences that have not ended, by model
        self.refusals: Counter[str] = Counter()  # new requests refused, by reason
        self.decisions = Decisions()  # the latest, with their reasons
        self.totals: dict[tuple[str, int], Counters] = {}  # by model and executor index
        self.draining = False
        self.stall_check_at: float | None = None  # seconds: when to look for executors that owe results
        self.deadlines: LazyHeap[tuple[float, int], Request] = LazyHeap(lambda request: request.ended)
        self.urgent: LazyHeap[tuple[float, int], Request] = LazyHeap(lambda r: r.started or r.ended)  # by when to start
        self.sequence_ids: Iterator[int] = itertools.count(first_sequence_id)
        self.arrivals: Iterator[int] = itertools.count(1)
        # What the kvmanager has not been told yet.
        self.kv_connected = False
        self.kv_lost_at: float | None = None
        self.asked: dict[int, Asked] = {}
        self.releases: list[int] = []
        self.keeps: list[int] = []  # of those released, the ones that come back
        self.progress: list[tuple[int, int, list[int]]] = []  # stay, computed length, tokens that it does not know
        self.extends: list[Sequence] = []
        self.forks: list[Sequence] = []

    @property
    def live_count(self) -> int:
        return self.live_counts.total()

    @property
    def running_count(self) -> int:
        return len(self.running)

    @property
    def waiting_count(self) -> int:
        return self.live_count - self.running_count

    def count_live(self, request: Request, sequences: int) -> None:
        """Counts sequences of a request that came, or, below zero, that ended."""
        self.live_counts[request.model] += sequences
        request.account.live_count += sequences

    def waiting_count_of(self, model: str) -> int:
        """Sequences of one model that hold no blocks."""
        return self.live_counts[model] - sum(len(e.running) for e in self.serving(model))

    @property
    def ready(self) -> bool:
        """Whether a new request can be answered now."""
        return not self.draining and self.kv_connected and any(executor.takes for executor in self.executors)

    def serving(self, model: str) -> list[Executor]:
        """Executors that have the model."""
        return [e for e in self.executors if e.connected and e.model is not None and e.model_name == model]
