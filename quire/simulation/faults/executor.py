"""An executor: its real core over KV that holds token ids, and around it what its step thread and its links do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from quire.simulation.faults.invariants import ExecutorChecks, Violation
from quire.simulation.faults.party import Party
from quire.simulation.faults.report import Ended, Reporter, ReportLink
from quire.simulation.faults.scenario import BLOCK_SIZE, ExecutorShape
from quire.simulation.faults.slots import Slots
from quire.simulation.faults.stream import SERVER, End, Stream, Wires
from quire.simulation.faults.truth import EOS, VOCAB, guess
from quire.v1 import executor_pb2, types_pb2
from services.common.errors import QuireError, Reason
from services.executor.admission import ModelLimits
from services.executor.batch import Row, StepLimits
from services.executor.core import StepCore
from services.executor.operations import Copies, Move
from services.executor.results import Results, StepTaken
from services.executor.tiers.pools import DEVICE, DISK, PoolMap, PoolSpec

MODEL = "m"
CONTEXT = 512
BLOCK_BYTES = 64
MOVE_SECONDS = (0.003, 0.003, 0.03, 0.3)
"""Of a block to or from a disk: some take long enough for a kvmanager to be replaced meanwhile."""
DEVICE_POOL, DISK_POOL = 0, 1
DRAIN_POLL_SECONDS = 0.01


class RunEnd:
    """The executor's end of one Run stream."""

    def __init__(self, party: ExecutorParty, stream: Stream) -> None:
        self.stream = stream
        self.epoch = 0
        self._party = party

    def received(self, stream: Stream, message: executor_pb2.RunRequest) -> None:
        if message.HasField("hello"):
            self._party.between_steps(lambda: self._party.open(self, message.hello))
        else:
            self._party.between_steps(lambda: self._party.take(self, message.plan))

    def closed(self, stream: Stream, error: QuireError) -> None:
        if self._party.session is self:
            self._party.session = None


class ExecutorParty(Reporter):
    """One executor after another, each with KV of its own."""

    def __init__(
        self, wires: Wires, index: int, shape: ExecutorShape, kvmanager: Party, checks: ExecutorChecks
    ) -> None:
        super().__init__(wires.timeline, f"executor-{index}")
        self.slow_factors: list[float] = []  # of what slows it down now; the worst counts
        self._wires, self._shape, self._kvmanager, self._checks = wires, shape, kvmanager, checks

    def start(self) -> None:
        shape = self._shape
        self.description = describe(f"{self.name}.{self.life}", shape)
        self.core = StepCore(StepLimits(shape.max_sequences, shape.max_step_tokens))
        self.core.set_model(_limits(shape))
        self.session: RunEnd | None = None
        self._slots = Slots(shape.blocks + shape.disk_blocks, BLOCK_SIZE)
        self._commands: deque[Callable[[], None]] = deque()
        self._is_computing = self._is_woken = False
        self._ends_at: float | None = None  # by its own clock: it drains
        self._report = ReportLink(self._wires, self, self._kvmanager)
        self._report.connect()

    def accept(self, kind: str, stream: Stream) -> End:
        return RunEnd(self, stream)

    def drain(self, seconds: float, then: Callable[[], None]) -> None:
        """Lets the scheduler place nothing more here; ends once nothing is left, or after so many seconds."""
        self._ends_at = self.now + seconds
        if self.session is not None:
            self._say_drain(self.session)
        self._await_rest(then)

    def _await_rest(self, then: Callable[[], None]) -> None:
        assert self._ends_at is not None
        if self.now >= self._ends_at or self.session is None or not self.core.sequences:
            then()
        else:
            self.after(DRAIN_POLL_SECONDS, self._await_rest, then)

    def _say_drain(self, end: RunEnd) -> None:
        if self._ends_at is not None:
            drain = executor_pb2.RunDrain(remaining_seconds=max(0.0, self._ends_at - self.now))
            end.stream.send(SERVER, executor_pb2.RunResponse(drain=drain))

    # What the step thread is told.

    def between_steps(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake()

    def open(self, end: RunEnd, hello: executor_pb2.RunHello) -> None:
        opened = self.core.open(hello)
        if self.session is not None:
            self.session.stream.close(SERVER, QuireError(Reason.STALE_EPOCH, f"epoch {opened.epoch} has begun"))
        end.epoch = opened.epoch
        self.session = end
        welcome = executor_pb2.RunWelcome(epoch=opened.epoch, description=self.description)
        end.stream.send(SERVER, executor_pb2.RunResponse(welcome=welcome))
        self._say_drain(end)
        self._report.epoch_opened(opened.epoch, opened.closed_epochs)

    def take(self, end: RunEnd, plan: executor_pb2.StepPlan) -> None:
        if self.core.epoch != end.epoch:
            return  # a newer stream is open by now
        try:
            self.core.take(plan)
        except QuireError as error:
            raise Violation(f"{self.name} refuses a sound scheduler's plan: {error.message}") from error

    # Steps

    def _wake(self) -> None:
        if not self._is_computing and not self._is_woken:
            self._is_woken = True
            self.after(0.0, self._go_on)

    def _go_on(self) -> None:
        self._is_woken = False
        while self._commands:
            self._commands.popleft()()
        core = self.core
        self._copy(core.copies_before())
        core.demote()
        self._move(core.moves_before())
        rows = core.choose()
        if not rows:
            self._copy(core.copies_after())
            self._move(core.moves_after())
            self._send(core.ledger.before_rest())
            return
        self._draft(rows)
        step = core.build(rows)
        self._checks.before_step(self, step)
        tokens = len(step.inputs.token_ids)
        seconds = (self._shape.step_seconds + tokens * self._shape.token_seconds) * max(self.slow_factors, default=1.0)
        outputs = self._slots.step(step.inputs)
        self._is_computing = True

        def finish() -> None:
            self._is_computing = False
            core.finish(step, outputs)
            self._copy(core.copies_after())
            self._move(core.moves_after())
            runs = [len(row.draft_ids) for row in rows]
            core.ledger.step_taken(StepTaken(seconds, 0.0, tokens, len(step.sampling), sum(runs), max(runs)))
            self._send(core.ledger.after_step())
            self._wake()

        self.after(seconds, finish)

    def _draft(self, rows: list[Row]) -> None:
        """Proposes what will come, with mistakes."""
        for row in rows:
            if row.draft_room:
                rule, tokens = row.sequence.rule, row.sequence.tokens
                row.draft_ids = guess(tokens, rule.seed, rule.choice, row.draft_room, self._shape.draft_quality)

    def _copy(self, copies: Copies) -> None:
        if copies.pairs:
            self._slots.copy(copies.pairs)
            self.core.copied(copies)

    def _move(self, moves: list[Move]) -> None:
        for move in moves:
            self.after(self._wires.rng.choice(MOVE_SECONDS), self._moved, move)

    def _moved(self, move: Move) -> None:
        assert move.source is not None
        assert move.destination is not None
        is_done = self._wires.rng.random() < 0.95
        if is_done:
            self._slots.copy([(move.source, move.destination)])
        closed = self.core.moved(move, is_done)
        self._report.operation_ended(Ended(move.operation_id, is_done))
        self._report.epochs_closed(closed)
        self._wake()

    def _send(self, message: Results | None) -> None:
        if message is None:
            return
        for operation_id in message.done_operation_ids:
            self._report.operation_ended(Ended(operation_id, True))
        if self.session is not None and self.session.epoch == message.epoch:
            self.session.stream.send(SERVER, executor_pb2.RunResponse(results=message))


def describe(executor_id: str, shape: ExecutorShape) -> types_pb2.ExecutorDescription:
    """What the executor says of itself."""
    pools = [(types_pb2.TIER_DEVICE, 0, shape.blocks)]
    if shape.disk_blocks:
        pools.append((types_pb2.TIER_DISK, shape.blocks, shape.disk_blocks))
    return types_pb2.ExecutorDescription(
        executor_id=executor_id,
        model=types_pb2.ModelDescription(
            name=MODEL,
            fingerprint="weights",
            tokenizer_fingerprint="tokenizer",
            context_length=CONTEXT,
            vocab_size=VOCAB,
            eos_token_ids=[EOS],
        ),
        groups=[types_pb2.CacheGroup(group_id=0, name="target", block_size=BLOCK_SIZE, block_bytes=BLOCK_BYTES)],
        pools=[
            types_pb2.BlockPool(
                pool_id=number,
                group_id=0,
                tier=tier,
                format=types_pb2.KV_FORMAT_FP32,
                block_count=count,
                first_block_id=first,
            )
            for number, (tier, first, count) in enumerate(pools)
        ],
        max_sequences=shape.max_sequences,
        max_step_tokens=shape.max_step_tokens,
        speculation=types_pb2.SpeculationDescription(proposer="draft", max_draft_tokens=shape.most_drafts)
        if shape.most_drafts
        else None,
        decode_step_seconds=shape.step_seconds + shape.token_seconds,
        prefill_tokens_per_second=1 / (shape.token_seconds + shape.step_seconds / shape.max_step_tokens),
    )


def _limits(shape: ExecutorShape) -> ModelLimits:
    pools = [PoolSpec(DEVICE_POOL, DEVICE, "fp32", BLOCK_BYTES, 0, shape.blocks)]
    if shape.disk_blocks:
        pools.append(PoolSpec(DISK_POOL, DISK, "fp32", BLOCK_BYTES, shape.blocks, shape.disk_blocks))
    return ModelLimits(VOCAB, CONTEXT, (EOS,), 1, BLOCK_SIZE, (0, shape.blocks), PoolMap(pools))
