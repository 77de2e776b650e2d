"""What a gateway tells its scheduler of open requests, and what the answers change. Pure but for the requests.

A token is (request, choice, output position): what a lost stream did not deliver comes again behind what is there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator

from quire.v1 import scheduler_pb2, types_pb2
from services.common.errors import QuireError, Reason
from services.gateway.outbox import Outbox
from services.gateway.requests import OpenRequest, RequestTable, Score

log = logging.getLogger("quire.gateway.link")


class Dispatch:
    """Owns what is still to be said. Requests that no scheduler has are parked until one with their model answers.

    Times are seconds of one monotonic clock.
    """

    def __init__(self, table: RequestTable, resume_seconds: float, hold_tokens: int) -> None:
        """A request with more than `hold_tokens` unread tokens is held until its reader took them."""
        self._table = table
        self._resume_seconds, self._hold_tokens = resume_seconds, hold_tokens
        self._parked: dict[int, OpenRequest] = {}
        self._scheduler_drains = False
        self.models: dict[str, types_pb2.ModelDescription] = {}
        self.outbox = Outbox()
        self.connected = False

    def submit(self, request: OpenRequest, now: float) -> None:
        """Sends a request as soon as a scheduler with its model is there."""
        self._park(request, now)
        self._unpark()

    def cancel(self, request: OpenRequest) -> None:
        """Ends a request at the scheduler."""
        if self._parked.pop(request.handle, None) is None and self.connected:
            self.outbox.cancel(request.handle)

    def forget(self, request: OpenRequest) -> None:
        """A request is complete: nothing is to be submitted again."""
        self._parked.pop(request.handle, None)

    def stop_at(self, request: OpenRequest, choice: int, length: int) -> None:
        """Ends a choice behind `length` output tokens."""
        if request.handle not in self._parked and self.connected:
            self.outbox.stop_at(request.handle, choice, length)

    def hold(self, request: OpenRequest, held: bool) -> None:
        """Pauses or resumes a request. The state is kept and told again after a loss."""
        request.held = held
        if request.handle not in self._parked and self.connected:
            self.outbox.hold(request.handle, held)

    def expire(self, now: float) -> None:
        """Fails parked requests that waited too long. Called regularly while requests are open.

        The end of a scheduler that drains is near: until then nobody is late.
        """
        if self._scheduler_drains:
            return
        for request in list(self._parked.values()):
            if request.parked_at is not None and now - request.parked_at >= self._resume_seconds:
                del self._parked[request.handle]
                what = f"no scheduler with model {request.model.name} came back in {self._resume_seconds:g} s"
                request.fail(QuireError(Reason.SCHEDULER_LOST, what))

    def connect(self) -> None:
        """A stream is up, and its first message was applied."""
        self.connected = True
        self._unpark()

    def lose(self, now: float) -> None:
        """The stream is gone, and with it whatever was to be said on it."""
        self.connected = False
        self.outbox = Outbox()
        for request in self._table:
            request.settle()
            if not request.complete and (self._scheduler_drains or request.handle not in self._parked):
                self._park(request, now)  # what a draining scheduler refused waits from now on
        self._scheduler_drains = False

    def apply(self, message: scheduler_pb2.ServeResponse, now: float) -> None:
        """Takes a message of the scheduler. Raises PROTOCOL where the stream cannot be trusted any more."""
        if message.models_changed:
            self.models = {model.name: model for model in message.models}
            self._unpark()
        for started in message.started:
            if (request := self._table.get(started.handle)) is not None:
                request.start(started, self.models.get(started.model))
        scores = self._apply_logprobs(message.logprobs) if message.logprobs else {}
        self._apply_tokens(message, scores, now)
        for embedding in message.embeddings:
            if (request := self._table.get(embedding.handle)) is not None:
                request.accept_embedding(embedding.values)
        for ended in message.ended:
            if (request := self._table.get(ended.handle)) is None:
                continue
            if ended.error.reason == Reason.DRAINING.name:  # it takes nothing new: the next scheduler does
                self._scheduler_drains = True
                self._park(request, now)
            else:
                request.accept_end(ended)
                if request.error is not None:
                    self.cancel(request)  # what its other choices still hold

    def _apply_tokens(
        self, message: scheduler_pb2.ServeResponse, scores: dict[tuple[int, int], list[Score]], now: float
    ) -> None:
        ids, offset = list(message.token_ids), 0
        columns = (message.handles, message.choices, message.positions, message.token_counts)
        if len({len(column) for column in columns}) != 1 or sum(message.token_counts) != len(ids):
            raise QuireError(Reason.PROTOCOL, "the scheduler sent columns of unequal length")
        for handle, choice, position, count in zip(*columns, strict=True):
            request = self._table.get(handle)
            if request is not None:
                new_scores = scores.get((handle, choice), [])
                with self._failing(request):
                    new_ids = ids[offset : offset + count]
                    request.accept_tokens(choice, position, new_ids, new_scores[:count], now)
                    if request.unread > self._hold_tokens and not request.held:
                        self.hold(request, True)
                del new_scores[:count]
            offset += count

    def _apply_logprobs(self, entries: Iterable[scheduler_pb2.ChoiceLogprobs]) -> dict[tuple[int, int], list[Score]]:
        """Hands prompt scores on and returns the output's, by (handle, choice)."""
        output: dict[tuple[int, int], list[Score]] = {}
        for entry in entries:
            request = self._table.get(entry.handle)
            if request is None:
                continue
            with self._failing(request):
                if entry.prompt.chosen:
                    request.accept_prompt_scores(entry.prompt_start, unpack(entry.prompt))
                output.setdefault((entry.handle, entry.choice), []).extend(unpack(entry.output))
        return output

    def _park(self, request: OpenRequest, now: float) -> None:
        request.parked_at = now
        self._parked[request.handle] = request

    def _unpark(self) -> None:
        """Submits parked requests whose model is there."""
        if not self.connected or self._scheduler_drains:
            return
        for request in list(self._parked.values()):
            present = self.models.get(request.model.name)
            if present is None:
                continue
            del self._parked[request.handle]
            request.parked_at = None
            if _identity(present) != _identity(request.model):
                request.fail(QuireError(Reason.SCHEDULER_LOST, f"model {present.name} changed while it was away"))
                continue
            self.outbox.submit(request)
            if request.held:
                self.outbox.hold(request.handle, True)

    @contextlib.contextmanager
    def _failing(self, request: OpenRequest) -> Iterator[None]:
        """Turns an error about one request into that request's end."""
        try:
            yield
        except QuireError as error:
            log.error("request failed", extra={"request_id": request.request_id, "error": error.message})
            request.fail(error)
            self.cancel(request)


def _identity(model: types_pb2.ModelDescription) -> tuple[str, str]:
    """What must not change under a request. An alias has no weights of its own: none were chosen yet."""
    return model.fingerprint, model.tokenizer_fingerprint


def unpack(packed: types_pb2.TokenLogprobs) -> list[Score]:
    """Scores of consecutive tokens. Raises PROTOCOL where the arrays do not fit together."""
    count, width = len(packed.chosen), packed.top_count
    if not len(packed.ranks) == count or not len(packed.top_token_ids) == len(packed.top_logprobs) == count * width:
        raise QuireError(Reason.PROTOCOL, "log probabilities have unequal lengths")
    top = list(zip(packed.top_token_ids, packed.top_logprobs, strict=True))
    return [
        Score(chosen, rank, tuple(top[i * width : (i + 1) * width]))
        for i, (chosen, rank) in enumerate(zip(packed.chosen, packed.ranks, strict=True))
    ]
