"""The step thread: takes commands between steps, computes while there is credit, sleeps otherwise.

The event loop's side puts commands into a queue and gets events through call_soon_threadsafe, one wake-up for all
that are pending.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import compress
from typing import Protocol, TypeVar

from quire.v1 import executor_pb2
from services.common.errors import QuireError, Reason
from services.executor.backends.base import Backend
from services.executor.batch import Row
from services.executor.core import Opened, StepCore
from services.executor.grammar.masks import MaskMaker
from services.executor.metrics import ExecutorMetrics
from services.executor.operations import Copies, Move
from services.executor.results import Results, StepTaken
from services.executor.speculation.proposer import DraftRequest, Proposer
from services.executor.tiers.store import Outcome

log = logging.getLogger("quire.executor")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fault:
    """The stream of this epoch must end with an error."""

    epoch: int
    error: QuireError


@dataclass(frozen=True, slots=True)
class Moved:
    """A move of a block between tiers ended."""

    operation_id: int
    is_done: bool  # else the destination does not hold the content


@dataclass(frozen=True, slots=True)
class Closed:
    """Nothing of these epochs runs any more."""

    epochs: list[int]


Event = Results | Fault | Moved | Closed


class Tiers(Protocol):
    """Makes moves beside the steps. The end of each is told to the Worker's `move_ended`."""

    def submit(self, move: Move) -> None: ...

    def drop(self) -> None:
        """Ends all moves that have not begun."""
        ...


class StepLoop:
    """Computes one step at a time; results and faults go to `emit`. Used by one thread."""

    def __init__(self, core: StepCore, emit: Callable[[Event], None], metrics: ExecutorMetrics) -> None:
        self.core = core
        self.backend: Backend | None = None
        self.proposer: Proposer | None = None
        self.draft_backend: Backend | None = None  # the draft model's
        self.tiers: Tiers | None = None
        self.masks: MaskMaker | None = None
        self.computing_since: float | None = None  # monotonic seconds; read by the watchdog
        self._emit = emit
        self._metrics = metrics

    def turn(self) -> bool:
        """One step; False, with everything sent, where nothing can be computed."""
        started = time.perf_counter()
        self._copy(self.core.copies_before())
        demoted = self.core.demote()
        if demoted and self.backend is not None:
            self.backend.demote_blocks(demoted)
        self._move(self.core.moves_before())
        rows = self.core.choose()
        if not rows or self.backend is None:
            self._copy(self.core.copies_after())
            self._move(self.core.moves_after())
            self._send(self.core.ledger.before_rest())
            return False
        self.computing_since = time.monotonic()
        catch_up_seconds, draft_seconds = self._draft(rows)
        drafting = catch_up_seconds + draft_seconds
        self.core.cut_drafts(rows)
        step = self.core.build(rows)
        if self.masks is not None:
            step.inputs.masks = self.masks.begin(step.sampling)
        compute_from = time.perf_counter()
        try:
            outputs = self.backend.step(step.inputs)
        except Exception as error:
            compute_seconds = time.perf_counter() - compute_from + drafting
            log.exception("a step failed", extra={"sequences": len(step.rows)})
            self.core.fail(step, QuireError(Reason.INTERNAL, f"the step failed: {type(error).__name__}"))
        else:
            compute_seconds = time.perf_counter() - compute_from + drafting
            self.core.finish(step, outputs)
            if self.proposer is not None and all(row.count == 1 for row in rows):
                self._tell(self.proposer, len(rows), len(step.inputs.token_ids), compute_seconds - drafting)
        self.computing_since = None
        self._copy(self.core.copies_after())
        self._move(self.core.moves_after())
        host_seconds = time.perf_counter() - started - compute_seconds
        runs = [len(row.draft_ids) for row in rows] if draft_seconds else [0]
        taken = StepTaken(
            compute_seconds,
            host_seconds,
            tokens=len(step.inputs.token_ids),
            sampled=len(step.sampling),
            drafts=sum(runs),
            draft_rounds=max(runs),
            draft_seconds=draft_seconds,
            catch_up_seconds=catch_up_seconds,
        )
        self.core.ledger.step_taken(taken)
        self._metrics.step(taken, len(self.core.sequences))
        self._send(self.core.ledger.after_step())
        return True

    def _draft(self, rows: list[Row]) -> tuple[float, float]:
        """Has drafts proposed for the rows with room; the seconds that catching up and proposing took."""
        with_room = [row for row in rows if row.draft_room]
        if not with_room or self.proposer is None:
            return 0.0, 0.0
        started = caught_up = time.perf_counter()
        try:
            requests = [DraftRequest(row.sequence, row.draft_room) for row in with_room]
            ready = self.proposer.catch_up(requests)
            caught_up = time.perf_counter()
            for row, is_ready in zip(with_room, ready, strict=True):
                row.is_behind = not is_ready
            with_room, requests = list(compress(with_room, ready)), list(compress(requests, ready))
            if not requests:
                return caught_up - started, 0.0
            drafts = self.proposer.propose(requests, self.core.tables, sum(row.count for row in rows))
            for row, draft_ids in zip(with_room, drafts, strict=True):
                row.draft_ids = draft_ids
        except Exception:
            self._drop(self.proposer)
        return caught_up - started, time.perf_counter() - caught_up

    def _tell(self, proposer: Proposer, plain: int, tokens: int, seconds: float) -> None:
        try:
            proposer.computed(plain, tokens, seconds)
        except Exception:
            self._drop(proposer)

    def _drop(self, proposer: Proposer) -> None:
        """A proposer that failed proposes nothing more until a model is loaded: it may fail at every step."""
        log.exception("drafts could not be proposed: there are none from now on", extra={"proposer": proposer.name})
        self.proposer = None

    def open(self, hello: executor_pb2.RunHello) -> Opened:
        """The core's, and ends what the older epoch has not begun to move."""
        opened = self.core.open(hello)
        if self.tiers is not None:
            self.tiers.drop()
        return opened

    def move_ended(self, move: Move, is_done: bool) -> None:
        closed = self.core.moved(move, is_done)
        self._emit(Moved(move.operation_id, is_done))
        if closed:
            self._emit(Closed(closed))

    def _move(self, moves: list[Move]) -> None:
        for move in moves:
            if self.tiers is None:
                self.move_ended(move, False)
            else:
                self.tiers.submit(move)

    def _copy(self, copies: Copies) -> None:
        if copies.operation_ids and self.backend is not None:
            self.backend.copy_blocks(copies.pairs)
            if copies.draft_pairs and self.draft_backend is not None:
                self.draft_backend.copy_blocks(copies.draft_pairs)
            self.core.copied(copies)

    def _send(self, message: Results | None) -> None:
        if message is not None:
            self._emit(message)


class Worker:
    """The step thread and its two doors."""

    def __init__(self, core: StepCore, on_event: Callable[[Event], None], metrics: ExecutorMetrics) -> None:
        """`on_event` is called on the running event loop."""
        self.steps = StepLoop(core, self._emit, metrics)
        self._metrics = metrics
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._events: deque[Event] = deque()
        self._woken = False
        self._thread = threading.Thread(target=self._run, name="step", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Ends the thread after the present step; waits for it, but not for ever."""
        self._commands.put(None)
        self._thread.join(seconds)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, epoch: int, plan: executor_pb2.StepPlan) -> None:
        """Hands over a plan that came on the stream of `epoch`; dropped where a newer one is open by then."""

        def take() -> None:
            core = self.steps.core
            if core.epoch != epoch:
                return
            try:
                core.take(plan)
            except QuireError as error:
                self._emit(Fault(epoch, error))

        self._commands.put(take)

    def wake(self) -> None:
        """Has the step thread look again for what it can compute. For any thread."""
        self._commands.put(lambda: None)

    def tell(self, function: Callable[[StepLoop], None]) -> None:
        """As `call`, but does not wait for it."""
        self._commands.put(lambda: function(self.steps))

    async def call(self, function: Callable[[StepLoop], T]) -> T:
        """Runs a function on the step thread, between two steps."""
        future: Future[T] = Future()

        def answer() -> None:
            if not future.set_running_or_notify_cancel():
                return  # whoever asked has gone
            try:
                future.set_result(function(self.steps))
            except BaseException as error:
                future.set_exception(error)

        self._commands.put(answer)
        return await asyncio.wrap_future(future)

    def move_made(self, byte_count: int, seconds: float) -> None:
        """Notes what a move between the device and a tier of this machine took. For any thread."""
        self.tell(lambda steps: steps.core.ledger.moved(byte_count, seconds))

    def move_ended(self, move: Move, outcome: Outcome) -> None:
        """Takes the end of a move in, on the step thread. For any thread."""
        self.tell(lambda steps: steps.move_ended(move, outcome is Outcome.DONE))

    def _run(self) -> None:
        while True:
            try:
                command = self._next_command()
                if command is None:
                    return
                command()
            except Exception as error:
                # Not a step's failure but a fault of the code around it: the epoch cannot be trusted any more.
                log.exception("the step thread met an unexpected error")
                self.steps.computing_since = None
                core = self.steps.core
                self._emit(Fault(core.epoch, QuireError(Reason.INTERNAL, f"step thread: {type(error).__name__}")))
                core.abandon()

    def _next_command(self) -> Callable[[], None] | None:
        """The next command, computing steps until there is one; sleeps where nothing can be computed."""
        while True:
            try:
                return self._commands.get_nowait()
            except queue.Empty:
                pass
            if not self.steps.turn():
                break
        rested_from = time.perf_counter()
        command = self._commands.get()
        core = self.steps.core
        self._metrics.rested(time.perf_counter() - rested_from, len(core.sequences))
        if core.sequences:
            core.ledger.idled(time.perf_counter() - rested_from)
        return command

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop may be closed while the last step ends
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # before looking, so that an event added meanwhile wakes again
        while self._events:
            self._on_event(self._events.popleft())
