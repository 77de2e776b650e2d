"""A sequence (one choice of one request), its lengths and its states."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.v1 import scheduler_pb2, types_pb2
from services.scheduler.speculation.acceptance import Habit
from services.scheduler.stays import Origin, Stay

if TYPE_CHECKING:
    from services.scheduler.beams import Beam, Beams
    from services.scheduler.fairness import Account
    from services.scheduler.order import Line
    from services.scheduler.state import Executor, Gateway

UNLIMITED_STEPS = 1 << 30
NEVER_REPORTED = 1 << 31
STOP_STRING_STEPS = 2
"""Unanswered steps of a sequence whose stop strings the gateway matches: what lies past a stop is lost."""


class Phase(enum.Enum):
    """Where a sequence is. Preemption and every loss lead from RUNNING (or RESERVING) back to WAITING."""

    WAITING = enum.auto()  # holds nothing
    RESERVING = enum.auto()  # the kvmanager was asked for blocks
    RUNNING = enum.auto()  # holds blocks on an executor
    ENDED = enum.auto()


_MOVES = {
    Phase.WAITING: {Phase.RESERVING, Phase.ENDED},
    Phase.RESERVING: {Phase.WAITING, Phase.RUNNING, Phase.ENDED},
    Phase.RUNNING: {Phase.WAITING, Phase.ENDED},
    Phase.ENDED: set[Phase](),
}


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """What all choices of a request share. Its submitted fields never change."""

    gateway: Gateway
    handle: int
    request_id: str
    model: str
    tokenizer_fingerprint: str  # token ids mean nothing under another tokenizer
    tenant: str
    priority: int
    sampling: types_pb2.SamplingParams
    stop: types_pb2.StopCriteria
    logprobs: types_pb2.LogprobOptions
    constraint: types_pb2.Constraint | None  # what the output must obey
    traceparent: str
    pooling: types_pb2.Pooling.ValueType  # how the prompt becomes a vector, if it does
    prompt_length: int
    arrival: int  # counts requests
    arrived_at: float  # seconds
    deadline_at: float | None  # seconds, same clock
    start_by: float  # seconds: when to start for the first token to come in time, or soon enough
    must_start_at: float | None  # the same where the client states a time
    target_gap: float | None  # seconds between tokens that the client aims at
    account: Account  # the tenant's at this model
    sequences: list[Sequence] = field(default_factory=list)  # those to compute, the lead first
    started: bool = False
    siblings_wait: bool = False  # the others queue once the lead's prompt is computed: they find its blocks
    held: bool = False
    alias: str = ""  # the name asked for, where that left the model open
    keep_seconds: float = 0.0  # for which it goes on without a gateway
    kept_until: float | None = None  # seconds: while it has none
    cached_tokens: int = 0  # of the prompt, when it began
    ends: list[scheduler_pb2.ChoiceEnd] = field(default_factory=list)  # told so far, of one that may be taken over
    beams: Beams | None = None  # the search whose paths its sequences are, best first; they are not its choices

    @property
    def lead(self) -> Sequence:
        return self.sequences[0]

    @property
    def most_tokens(self) -> int:
        """Tokens of one of its sequences that come to need KV at most: the last one of the output needs none."""
        return self.prompt_length + self.stop.max_tokens - 1

    @property
    def ended(self) -> bool:
        return all(sequence.phase is Phase.ENDED for sequence in self.sequences)


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One choice. Its owner is the scheduler's state: nothing else changes it.

    A stay on an executor has its own id, since ids are never used twice; `sequence_id` names the present one.
    """

    request: Request
    choice: int
    token_ids: list[int]  # prompt, then output
    length_limit: int  # the most tokens that ever need KV: the last output token needs none
    step_limit: int  # the most unanswered steps; 0 while held
    wants_prompt_scores: bool
    phase: Phase = Phase.WAITING
    preempted: bool = False
    yielded: bool = False  # gave its place to more urgent work, which it does once
    promoted: bool = False  # got such a place: it waits before those of its priority
    charged: bool = False  # the tokens that it began with count as served to its tenant
    line: Line | None = None  # where it waits, under the fair order
    prompt_scored: int = 1  # prompt tokens whose log probabilities were delivered; token 0 has none
    expected_output: int = 0  # tokens in all, as predicted
    habit: Habit = field(default_factory=lambda: Habit(0))  # of its drafts
    beam: Beam | None = None  # its part in beam search
    origin: Origin | None = None  # whose KV it begins with, while it waits

    # The present stay.
    sequence_id: int = 0
    executor: Executor | None = None
    stay: Stay | None = None
    slots_held: int = 0  # token slots of its blocks
    slots_asked: int = 0  # slots_held, or what it will hold once the kvmanager answers
    reported_length: int = 0  # tokens that the kvmanager knows
    next_report_length: int = 0  # computed length at which a further block is full
    computed_length: int = 0  # tokens with KV, by the last result
    projected_length: int = 0  # tokens with KV once every granted step is computed: an upper bound
    granted_steps: int = 0  # not yet answered
    chunks: list[int] = field(default_factory=list)  # tokens of each unanswered prefill chunk, the first of those steps
    draft_limits: list[int] = field(default_factory=list)  # of each unanswered step; empty where none has drafts
    draft_credit: int = 0  # drafts that unanswered steps and later ones may have accepted in all
    answered_at: float = 0.0  # seconds: the last result, or the grant that ended a pause

    @property
    def prompt_length(self) -> int:
        return self.request.prompt_length

    @property
    def computes_whole_prompt(self) -> bool:
        """Whether each token of the prompt has to be computed, whatever is cached."""
        return self.wants_prompt_scores or bool(self.request.pooling)

    @property
    def output_length(self) -> int:
        return len(self.token_ids) - self.request.prompt_length

    @property
    def least_length(self) -> int:
        """Tokens with KV once every granted step is computed, if no draft is accepted."""
        return self.computed_length + sum(self.chunks) + self.granted_steps - len(self.chunks)

    @property
    def is_prefilling(self) -> bool:
        """Whether known tokens are left that no granted step computes."""
        return self.projected_length < len(self.token_ids)

    @property
    def rests(self) -> bool:
        """Whether it is a path of beam search that waits for the others: there is nothing to compute."""
        return self.beam is not None and self.beam.options is not None

    def note_reported(self, block_size: int) -> None:
        """The kvmanager knows all tokens and the computed length; it hears again once a further block is full.

        Not where nothing is to be kept: blocks that it does not hear of as computed are free once they are released.
        But where formats change with age it has to follow.
        """
        self.reported_length = len(self.token_ids)
        self.next_report_length = (self.computed_length // block_size + 1) * block_size
        if self.request.pooling and self.stay is not None and not self.stay.kv_policy:
            self.next_report_length = NEVER_REPORTED

    def move(self, phase: Phase) -> None:
        assert phase in _MOVES[self.phase], f"{self.phase} to {phase}"
        self.phase = phase

    def forget_stay(self) -> None:
        """Clears what belonged to the stay that is over."""
        self.sequence_id, self.executor, self.stay = 0, None, None
        self.slots_held = self.slots_asked = self.reported_length = self.next_report_length = 0
        self.computed_length = self.projected_length = self.granted_steps = self.draft_credit = 0
        self.chunks, self.draft_limits = [], []


def step_limit(request: Request) -> int:
    """The most unanswered steps that a sequence of this request may have."""
    if request.held:
        return 0
    if request.beams is not None:
        return 1
    return STOP_STRING_STEPS if request.stop.stop else UNLIMITED_STEPS
