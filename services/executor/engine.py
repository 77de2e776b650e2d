"""The executor as one object: the model it holds, the epoch it obeys, and who must hear of changes."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

from quire.v1 import executor_pb2, kvmanager_pb2, types_pb2
from services.common.errors import QuireError, Reason
from services.executor.batch import StepLimits
from services.executor.core import StepCore
from services.executor.description import describe_empty, describe_loaded
from services.executor.kv_link import KvLink
from services.executor.loader import LoadedModel, Loader
from services.executor.metrics import ExecutorMetrics
from services.executor.numa_binding import kv_place
from services.executor.results import Results
from services.executor.warmup import warm_up
from services.executor.worker import Closed, Event, Fault, Moved, StepLoop, Worker

log = logging.getLogger("quire.executor")
STOP_SECONDS = 10.0
IDLE_POLL_SECONDS = 0.02
T = TypeVar("T")
Outgoing = Results | types_pb2.ExecutorDescription | executor_pb2.RunDrain | QuireError | None


class Session:
    """One scheduler's epoch: what its stream is to send, in order. An error, or None for a plain end, is the last."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.outgoing: asyncio.Queue[Outgoing] = asyncio.Queue()


class Engine:
    """Lives on the event loop; all computing happens on the worker's thread."""

    def __init__(
        self,
        limits: StepLimits,
        loader: Loader,
        link: KvLink,
        metrics: ExecutorMetrics,
        on_ready: Callable[[bool], Awaitable[None]],
    ) -> None:
        """`on_ready` hears whether a warm model is held, each time that changes."""
        self.executor_id = uuid.uuid4().hex
        self._limits = limits
        self._loader = loader
        self._link = link
        self._metrics = metrics
        self._on_ready = on_ready
        self._session: Session | None = None
        self._opening = asyncio.Lock()
        self._changing = asyncio.Lock()
        self._moved = asyncio.Event()  # sequences or stream may have gone
        self._ends_at: float | None = None  # seconds of the event loop: a drain has begun
        self._description = describe_empty(self.executor_id, limits)
        self.model: LoadedModel | None = None
        self.worker = Worker(StepCore(limits), self._on_event, metrics)

    def start(self) -> None:
        self.worker.start()
        self._link.start(self)

    async def stop(self) -> None:
        """Ends the stream, the link and, after its present step, the thread; lets go of the model."""
        self._end_session(QuireError(Reason.DRAINING, "the executor is stopping"))
        await self._link.stop()
        await asyncio.to_thread(self.worker.stop, STOP_SECONDS)
        if self.model is not None and self.model.tiers is not None:
            await asyncio.to_thread(self.model.tiers.close)
        if self.model is not None and self.model.grammars is not None:
            self.model.grammars.close()
        self.model = None
        if not self.worker.alive:
            self.worker.steps.backend = None

    @property
    def description(self) -> types_pb2.ExecutorDescription:
        return self._description

    @property
    def epoch(self) -> int:
        return self.worker.steps.core.epoch

    @property
    def sequence_count(self) -> int:
        return len(self.worker.steps.core.sequences)

    @property
    def draining(self) -> bool:
        """Whether this process is about to end."""
        return self._ends_at is not None

    async def open(self, hello: executor_pb2.RunHello) -> Session:
        """A new epoch; the older stream ends with STALE_EPOCH. Results that its scheduler missed come first."""
        async with self._opening:
            opened = await self.worker.call(lambda steps: steps.open(hello))
            self._end_session(QuireError(Reason.STALE_EPOCH, f"epoch {opened.epoch} has begun"))
            session = Session(opened.epoch)
            self._say_drain(session)
            for results in opened.unseen:
                session.outgoing.put_nowait(results)
            self._session = session
            self._moved.set()
            self._link.epoch_opened(opened.epoch, opened.closed_epochs)
            log.info("epoch opened", extra={"epoch": opened.epoch, "scheduler": hello.scheduler_id})
            return session

    def close(self, session: Session) -> None:
        """The stream is gone. Its sequences use up their credit; their results wait for the next hello."""
        if self._session is session:
            self._session = None
            self._moved.set()

    async def drain(self, seconds: float) -> None:
        """Has nothing more placed here; returns once no sequence is left, or no stream that could go on with it.

        `seconds`: how long the process waits for that.
        """
        self._ends_at = asyncio.get_running_loop().time() + seconds
        if self._session is not None:
            self._say_drain(self._session)
        while self._session is not None and self.sequence_count:
            self._moved.clear()
            await self._moved.wait()
        await self.worker.call(lambda steps: None)  # what the last step had to say has left the step thread by then
        self._end_session(QuireError(Reason.DRAINING, "the executor has ended"))

    async def load(self, name: str, source: str) -> None:
        """Loads and warms a model up. Raises PRECONDITION where one is held or being loaded, MODEL_LOAD_FAILED."""
        if self.model is not None or self._changing.locked():
            raise QuireError(Reason.PRECONDITION, "a model is held or being loaded; unload it first")
        async with self._changing:
            model = await _in_thread(lambda: self._loader(name, source))

            def install(steps: StepLoop) -> types_pb2.ExecutorDescription:
                context = model.backend.spec.context_length
                measured = warm_up(model.backend, model.shape, self._limits.tokens, context, model.proposer)
                steps.backend, steps.tiers, steps.proposer = model.backend, model.tiers, model.proposer
                found = model.tiers.found() if model.tiers is not None else ()
                steps.draft_backend = model.draft.backend if model.draft is not None else None
                draft_cache = model.draft.cache if model.draft is not None else None
                steps.core.set_model(model.limits, found, draft_cache, model.grammars)
                steps.masks = model.grammars.masks if model.grammars is not None else None
                return describe_loaded(self.executor_id, self._limits, model, measured, kv_place(model.backend.device))

            if model.tiers is not None:
                model.tiers.start(self._metrics.tiers, self.worker.move_ended, self.worker.move_made)
            if model.grammars is not None:
                model.grammars.start(self.worker.wake)
            try:
                description = await self.worker.call(install)
            except Exception as error:
                if model.tiers is not None:
                    await asyncio.to_thread(model.tiers.close)
                if model.grammars is not None:
                    model.grammars.close()
                if isinstance(error, QuireError):
                    raise
                log.exception("warm-up failed", extra={"source": source})
                raise QuireError(Reason.MODEL_LOAD_FAILED, f"warm-up: {type(error).__name__}: {error}") from error
            self.model = model
            self._metrics.blocks_allocated(model.shape.pool_starts[-1])
            await self._change(description)
            gc.collect()
            gc.freeze()  # what a model brought stays: no collection need walk it again

    async def unload(self) -> None:
        """Ends all sequences and frees the model. Raises PRECONDITION where none is held."""
        if self.model is None or self._changing.locked():
            raise QuireError(Reason.PRECONDITION, "no model is held")
        async with self._changing:

            def part(steps: StepLoop) -> None:
                steps.tiers = None

            def remove(steps: StepLoop) -> None:
                steps.backend = steps.draft_backend = steps.proposer = steps.masks = None
                steps.core.set_model(None)

            await self._on_ready(False)
            if self.model.tiers is not None:
                await self.worker.call(part)
                await asyncio.to_thread(self.model.tiers.close)  # now nothing moves into or out of the model's KV
            await self.worker.call(remove)
            if self.model.grammars is not None:
                self.model.grammars.close()
            self.model = None
            self._metrics.blocks_allocated(0)
            await self._change(describe_empty(self.executor_id, self._limits))
            gc.unfreeze()
            gc.collect()

    async def _change(self, description: types_pb2.ExecutorDescription) -> None:
        self._description = description
        self._metrics.sequences_present(0)
        self._link.registration_changed()
        if self._session is not None:
            self._session.outgoing.put_nowait(description)
        await self._on_ready(self.model is not None)

    def _say_drain(self, session: Session) -> None:
        if self._ends_at is not None:
            remaining = max(0.0, self._ends_at - asyncio.get_running_loop().time())
            session.outgoing.put_nowait(executor_pb2.RunDrain(remaining_seconds=remaining))

    def _end_session(self, error: QuireError) -> None:
        if self._session is not None:
            self._session.outgoing.put_nowait(error)
            self._session = None

    def _on_event(self, event: Event) -> None:
        self._moved.set()
        session = self._session
        if isinstance(event, Fault):
            if session is not None and session.epoch == event.epoch:
                log.warning("stream faulted", extra={"reason": event.error.reason.name, "what": event.error.message})
                self._end_session(event.error)
            return
        if isinstance(event, Moved):
            self._link.operation_ended(event.operation_id, event.is_done)
            return
        if isinstance(event, Closed):
            self._link.epochs_closed(event.epochs)
            return
        self._link.progressed(event)
        if session is not None and session.epoch == event.epoch:
            session.outgoing.put_nowait(event)

    # What its link asks for.

    async def registration(self) -> types_pb2.ExecutorDescription:
        """What it is, while no block is moved.

        A kvmanager that has restarted knows of no operation: what it takes for free must not be written any more.
        """
        await self.worker.call(lambda steps: steps.core.operations.hold())
        while not await self.worker.call(lambda steps: steps.core.operations.idle):  # noqa: ASYNC110 - rare and short
            await asyncio.sleep(IDLE_POLL_SECONDS)
        return self._description

    async def inventory(self) -> list[executor_pb2.SealedBlock]:
        """Which blocks hold what content now."""
        return await self.worker.call(lambda steps: steps.core.sealed_blocks())

    def registered(self, response: kvmanager_pb2.ReportResponse) -> None:
        """Blocks may be moved again: what this kvmanager asks for."""
        first_id = response.first_operation_id
        self.worker.tell(lambda steps: steps.core.operations.resume(first_id))


async def _in_thread(function: Callable[[], T]) -> T:
    """Runs a long function in a thread that does not keep the process alive once a signal came."""
    future: Future[T] = Future()

    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return await asyncio.wrap_future(future)
