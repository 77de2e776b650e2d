"""One request that runs here, from its submission to its end, with whoever reads it.

The last reader's leaving ends it: at once, or, where a window is set, once nobody has come back for so long. Meanwhile
it is read on here, so that stop strings are found and the rest is there for whoever comes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from quire.v1 import types_pb2
from services.common.errors import QuireError, Reason
from services.gateway.events import Event
from services.gateway.positions import Seen
from services.gateway.quota.quota import Quota
from services.gateway.reading import Opened, Reading, usage_of
from services.gateway.requests import OpenRequest, RequestTable
from services.gateway.scheduler_link import SchedulerLinks

log = logging.getLogger("quire.gateway")

MOST_SCORES = 1 << 17
"""Log probabilities that are kept of a stream for whoever comes back; of one with more nothing is kept."""
ABORTS = (Reason.CANCELLED, Reason.DEADLINE, Reason.TAKEN_OVER)


class Stream:
    """Owns one request's life here. Its grant is settled when it ends."""

    def __init__(
        self,
        opened: Opened,
        links: SchedulerLinks,
        table: RequestTable,
        quota: Quota,
        window: float,
        on_end: Callable[[Stream], None],
    ) -> None:
        """`window` in seconds. `on_end` is called once."""
        self.opened, self.request = opened, opened.request
        self._links, self._table, self._quota, self.window, self._on_end = links, table, quota, window, on_end
        self._absent: Reading | None = None  # reads on while nobody does
        self._left_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.ended = self.clean = False

    @property
    def is_read(self) -> bool:
        """Whether some client reads it."""
        return any(reader is not self._absent for reader in self.request.readers)

    @property
    def can_begin_anew(self) -> bool:
        """Whether all of it is still there for another reader."""
        return all(choice.scores_from == 0 for choice in self.request.choices)

    def start(self) -> None:
        """Submits the request."""
        request = self.request
        self._table.add(request)
        if request.deadline_at is not None:
            late = QuireError(Reason.DEADLINE, "the deadline passed")
            self._timer = asyncio.get_running_loop().call_at(request.deadline_at, self.fail, late)
        self._links.submit(request)

    def read(self, seen: Sequence[Seen] | None = None) -> Reading:
        """One more reader, from the first event or behind what its client has."""
        reading = Reading(self.opened, seen, kept=self.window > 0)
        if self._absent is not None:
            self._absent.close()
            self._absent = None
        return reading

    def advance(self, reading: Reading) -> list[Event]:
        """What is new to a reader. Behind the last event the stream has ended."""
        events, stopped = reading.advance()
        request = self.request
        if request.error is None:
            for index in stopped:
                self._links.stop_at(request, index, len(request.choices[index].output))
        if stopped:
            request.wake()
        if request.wants_scores and (not self.window or _scores_of(request) > MOST_SCORES):
            request.forget_read_scores()
        if reading.finished:
            self._end(_outcome(request), None)
        elif request.held and not self.ended:
            self._links.hold(request, False)
        return events

    def leave(self, reading: Reading) -> None:
        """A client reads no more: it has all, met the error, or went away."""
        request = self.request
        others = any(reader not in (reading, self._absent) for reader in request.readers)
        if self.ended or others or reading not in request.readers:
            reading.close()
        elif request.error is not None:
            reading.close()
            self._end_failed(request.error)
        elif self.window:
            self._absent, self._left_at = reading, asyncio.get_running_loop().time()
        else:
            reading.close()
            self._end("abort", QuireError(Reason.CANCELLED, "the request was cancelled"))

    def cut(self, reading: Reading, error: QuireError) -> None:
        """A client left its tokens unread too long. Where it was the only one, that ends the request too."""
        if not self.window and not self.ended and len(self.request.readers) == 1:
            reading.close()
            self.fail(error)
        else:
            self.leave(reading)

    def cancel(self) -> None:
        """Ends the request, whoever reads it."""
        self.fail(QuireError(Reason.CANCELLED, "the request was cancelled"))

    def fail(self, error: QuireError) -> None:
        """Ends the request with an error; its readers meet it behind the tokens that came before."""
        if self.ended:
            return
        if not self.request.complete:
            self._links.cancel(self.request)
        self.request.fail(error)
        if not self.is_read:
            self._end_failed(self.request.error or error)

    def look(self, now: float) -> None:
        """Called regularly: reads on for whoever may come, until the window is over or the request is."""
        if self._absent is None:
            return
        self.advance(self._absent)
        if self.request.error is not None:
            self._end_failed(self.request.error)
        elif now - self._left_at >= self.window:
            self._end("abort", QuireError(Reason.CANCELLED, f"no client came back in {self.window:g} s"))

    def hand_over(self) -> None:
        """Lets go of a request that nobody reads, so that another gateway may attach to it at its scheduler."""
        if not self.ended and not self.is_read:
            self._end("abort", QuireError(Reason.TAKEN_OVER, "the gateway ended"), cancels=False)

    def _end_failed(self, error: QuireError) -> None:
        self._end("abort" if error.reason in ABORTS else "error", error)

    def _end(self, outcome: str, error: QuireError | None, *, cancels: bool = True) -> None:
        if self.ended:
            return
        self.ended, self.clean = True, error is None
        request = self.request
        if self._timer is not None:
            self._timer.cancel()
        if self._absent is not None:
            self._absent.close()
        if request.complete:
            self._links.forget(request)
        elif cancels:
            self._links.cancel(request)
        if error is not None:
            request.fail(error)
        self._table.remove(request)
        self._settle(error)
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
        self.opened.meter.finish(outcome, len(request.prompt_ids), output, asyncio.get_running_loop().time())
        request.wake()  # a reader that waits meets the error
        self._on_end(self)

    def _settle(self, error: QuireError | None) -> None:
        """Says what the request used in the end. What goes on elsewhere is counted there, and stays held here."""
        request, grant, finished = self.request, self.opened.grant, usage_of(self.request)
        if error is not None and error.reason is Reason.TAKEN_OVER:
            self._quota.settle(grant, max(grant.held, grant.used()))
            return
        prompt, output = finished.prompt_tokens, finished.completion_tokens
        self._quota.settle(grant, prompt + output)
        self._quota.count(request.tenant, request.model.name, prompt, finished.cached_tokens, output)


def _scores_of(request: OpenRequest) -> int:
    """Log probabilities of its output so far, alternatives included."""
    each = 1 + request.template.logprobs.output_count
    return each * sum(len(choice.output) for choice in request.choices)


def _outcome(request: OpenRequest) -> str:
    """How a whole request ended: by length where any choice did."""
    lengths = any(choice.end == types_pb2.FINISH_REASON_LENGTH for choice in request.choices)
    return "length" if lengths else "stop"
