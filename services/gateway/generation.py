"""One generation as its reader sees it: an iterator of events that ends cleanly only with a finish reason."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass

from quire.v1 import types_pb2
from services.common.errors import QuireError, Reason
from services.gateway.deltas import DeltaMaker, Vocabulary, scored_prompt
from services.gateway.events import Embedded, Event, Finished, PromptScores, Started
from services.gateway.metrics import RequestMeter
from services.gateway.quota.quota import Grant, Quota
from services.gateway.requests import OpenRequest, RequestTable
from services.gateway.scheduler_link import SchedulerLink

log = logging.getLogger("quire.gateway")
INLINE_SCORES = 4096


@dataclass(frozen=True, slots=True)
class Opened:
    """A submitted request with what makes text of it."""

    request: OpenRequest
    vocabulary: Vocabulary
    makers: list[DeltaMaker]
    meter: RequestMeter
    grant: Grant


class Generation(AsyncIterator[Event]):
    """Events of one request. `cancel()` ends it at any time, and so does cancelling a pending `anext`."""

    def __init__(
        self,
        opening: Callable[[], Awaitable[Opened]],
        link: SchedulerLink,
        table: RequestTable,
        quota: Quota,
        on_cut: Callable[[], None] | None,
    ) -> None:
        self._opening, self._link, self._table, self._on_cut = opening, link, table, on_cut
        self._quota = quota
        self._opened: Opened | None = None
        self._events: deque[Event] = deque()
        self._scores: PromptScores | None = None
        self._begun = self._scores_sent = self._embedded = self._cut = self._waiting = False
        self._left_at = 0.0  # when the reader went away with its last event
        self._timer: asyncio.TimerHandle | None = None
        self._error: QuireError | None = None
        self.closed = False

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Event:
        self._waiting = True
        try:
            if self._opened is None and not self.closed:
                self._opened = await self._open()
            while not self._events:
                if self.closed or self._opened is None:
                    raise self._error or StopAsyncIteration
                await self._opened.request.changed()
                await self._score_prompt(self._opened)
                self._advance(self._opened)
            return self._events.popleft()
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            self._waiting = False
            self._left_at = asyncio.get_running_loop().time()

    def cancel(self) -> None:
        """Ends the request and frees what it holds. Idempotent; after the last event it does nothing."""
        self._close("abort", QuireError(Reason.CANCELLED, "the request was cancelled"))

    async def aclose(self) -> None:
        """As `cancel`, for `contextlib.aclosing`."""
        self.cancel()

    def stalled(self, now: float) -> float:
        """Seconds for which the reader has left something unread."""
        if self._waiting or self.closed or self._opened is None:
            return 0.0
        request = self._opened.request
        return now - self._left_at if self._events or request.unread or request.complete else 0.0

    def cut(self) -> None:
        """Ends the request of a reader that stalled; it meets SLOW_READER when it comes back. Idempotent."""
        if self._opened is None or self._cut:
            return
        self._cut = True
        self._events.clear()
        self._opened.request.drop_unread()
        self._fail(self._opened.request, QuireError(Reason.SLOW_READER, "the client left its tokens unread too long"))

    def abandon(self) -> None:
        """Gives a reader up that was cut and did not come back."""
        assert self._opened is not None
        self._close("error", self._opened.request.error)
        if self._on_cut is not None:
            self._on_cut()

    async def _open(self) -> Opened:
        try:
            opened = await self._opening()
        except QuireError as error:
            self.closed, self._error = True, error
            raise
        request = opened.request
        if self.closed:  # cancelled meanwhile
            self._link.cancel(request)
            self._table.remove(request)
            self._quota.settle(opened.grant, 0)
        elif request.deadline_at is not None:
            late = QuireError(Reason.DEADLINE, "the deadline passed")
            self._timer = asyncio.get_running_loop().call_at(request.deadline_at, self._fail, request, late)
        return opened

    def _fail(self, request: OpenRequest, error: QuireError) -> None:
        if not request.complete:
            self._link.cancel(request)
        request.fail(error)

    def _advance(self, opened: Opened) -> None:
        """Turns what arrived into events; closes behind the last one. An error comes behind the tokens before it."""
        request, events = opened.request, self._events
        if not self._cut:
            if not self._begun and request.started is not None:
                self._begun = True
                events.append(_started(request, opened.grant.headers))
            if self._scores is not None and not self._scores_sent:
                self._scores_sent = True
                events.append(self._scores)
            if request.embedding is not None and not self._embedded:
                self._embedded = True
                events.append(Embedded(request.embedding))
            self._take_deltas(opened)
        if not self._cut and all(maker.finished for maker in opened.makers):
            events.append(_finished(opened))
            self._close(_outcome(request), None)
        elif request.error is not None:
            aborted = request.error.reason in (Reason.CANCELLED, Reason.DEADLINE)
            self._close("abort" if aborted else "error", request.error)
        elif request.held:
            self._link.hold(request, False)

    async def _score_prompt(self, opened: Opened) -> None:
        """Makes the prompt's scores once they are complete, beside the event loop where they are many."""
        request = opened.request
        if (
            self._scores is None
            and request.started is not None
            and request.wants_prompt_scores
            and request.prompt_scored
        ):
            width = 1 + request.template.logprobs.prompt_count
            make = functools.partial(scored_prompt, opened.vocabulary, request.prompt_ids, request.prompt_scores)
            large = width * len(request.prompt_ids) > INLINE_SCORES
            self._scores = PromptScores(await asyncio.to_thread(make) if large else make())

    def _take_deltas(self, opened: Opened) -> None:
        for maker, choice in zip(opened.makers, opened.request.choices, strict=True):
            if (delta := maker.take()) is not None:
                self._events.append(delta)
                if choice.ended_by_gateway and opened.request.error is None:
                    self._link.stop_at(opened.request, choice.index, len(choice.output))

    def _close(self, outcome: str, error: QuireError | None) -> None:
        """Ends everything but the events that wait to be read; behind them the reader meets the error, if any."""
        if self.closed:
            return
        self.closed, self._error = True, error
        if self._timer is not None:
            self._timer.cancel()
        if self._opened is None:
            return
        request = self._opened.request
        if request.complete:
            self._link.forget(request)
        else:
            self._link.cancel(request)
        self._table.remove(request)
        self._settle(self._opened)
        output = sum(len(choice.output) for choice in request.choices)
        log.log(
            logging.WARNING if outcome == "error" else logging.DEBUG,
            "request ended",
            extra={
                "request_id": request.request_id,
                "tenant": request.tenant,
                "outcome": outcome,
                "tokens": output,
                "reason": str(error or ""),
            },
        )
        self._opened.meter.finish(outcome, len(request.prompt_ids), output, asyncio.get_running_loop().time())
        request.wake()  # a reader that waits meets the error

    def _settle(self, opened: Opened) -> None:
        """Says what the request used in the end."""
        request, finished = opened.request, _finished(opened)
        prompt, output = finished.prompt_tokens, finished.completion_tokens
        self._quota.settle(opened.grant, prompt + output)
        self._quota.count(request.tenant, request.model.name, prompt, finished.cached_tokens, output)


def _started(request: OpenRequest, headers: Mapping[str, str]) -> Started:
    return Started(
        request_id=request.request_id,
        model=request.model.name,
        created=int(time.time()),
        prompt_token_ids=tuple(request.prompt_ids),
        cached_tokens=request.started.cached_tokens if request.started is not None else 0,
        seed=request.template.sampling.seed,
        headers=headers,
    )


def _finished(opened: Opened) -> Finished:
    request = opened.request
    output = sum(len(choice.output) for choice in request.choices)
    cached = request.started.cached_tokens if request.started is not None else 0
    told = [maker.reasoning_tokens for maker in opened.makers if maker.reasoning_tokens is not None]
    return Finished(len(request.prompt_ids), output, cached, sum(told) if told else None)


def _outcome(request: OpenRequest) -> str:
    """How a whole request ended: by length where any choice did."""
    lengths = any(choice.end == types_pb2.FINISH_REASON_LENGTH for choice in request.choices)
    return "length" if lengths else "stop"
