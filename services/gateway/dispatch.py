"""What a gateway tells one scheduler of the requests that it has there, and what the answers change.

Pure but for the requests. A token is (request, choice, output position): what a lost stream did not deliver comes again
behind what is there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Protocol

from quire.v1 import scheduler_pb2, types_pb2
from services.common.errors import QuireError, Reason
from services.gateway.outbox import Outbox
from services.gateway.requests import OpenRequest, Score

log = logging.getLogger("quire.gateway.link")


class Home(Protocol):
    """Who decides which scheduler has which request."""

    def returned(self, request: OpenRequest, dispatch: Dispatch, now: float) -> None:
        """The scheduler does not have the request any more, and nothing speaks against the next one."""

    def refused(self, request: OpenRequest, dispatch: Dispatch, error: QuireError, now: float) -> bool:
        """The scheduler ended a request with an error. Whether it goes on elsewhere."""

    def began(self, request: OpenRequest, dispatch: Dispatch, now: float) -> None:
        """The scheduler has placed a request."""

    def answered(self, request: OpenRequest, dispatch: Dispatch, now: float) -> None:
        """A request's first tokens came."""

    def changed(self, dispatch: Dispatch, now: float) -> None:
        """The scheduler's models are others now."""


class Dispatch:
    """Owns what is still to be said to one scheduler. Times are seconds of one monotonic clock."""

    def __init__(self, name: str, home: Home, hold_tokens: int) -> None:
        """A request with more than `hold_tokens` unread tokens is held until its readers took them."""
        self.name, self._home, self._hold_tokens = name, home, hold_tokens
        self._mine: dict[int, OpenRequest] = {}
        self.load = 0  # choices of the requests that the scheduler has from here
        self._attaching: set[int] = set()  # handles of requests that the scheduler may not have any more
        self.models: dict[str, types_pb2.ModelDescription] = {}
        self.outbox = Outbox()
        self.connected = self.drains = False

    @property
    def takes(self) -> bool:
        """Whether the scheduler is there and not about to end."""
        return self.connected and not self.drains

    def submit(self, request: OpenRequest) -> None:
        """Gives the scheduler a request, or attaches to it where it may run there already."""
        self._mine[request.handle] = request
        self.load += len(request.choices)
        if request.may_run_at == self.name and request.can_be_attached_to:
            self._attaching.add(request.handle)
            self.outbox.attach(request)
        else:
            self.outbox.submit(request)
        request.may_run_at = self.name
        if request.held:
            self.outbox.hold(request.handle, True)

    def cancel(self, request: OpenRequest) -> None:
        """Ends a request at the scheduler. Idempotent."""
        if self._drop(request) and self.connected:
            self.outbox.cancel(request.handle)

    def forget(self, request: OpenRequest) -> None:
        """A request is complete: nothing is to be submitted again."""
        self._drop(request)

    def stop_at(self, request: OpenRequest, choice: int, length: int) -> None:
        """Ends a choice behind `length` output tokens."""
        if request.handle in self._mine and self.connected:
            self.outbox.stop_at(request.handle, choice, length)

    def hold(self, request: OpenRequest, held: bool) -> None:
        """Pauses or resumes a request. The state is told again after a loss."""
        if request.handle in self._mine and self.connected:
            self.outbox.hold(request.handle, held)

    def connect(self) -> None:
        """A stream is up, and its first message was applied."""
        self.connected = True

    def lose(self, now: float) -> None:
        """The stream is gone, and with it whatever was to be said on it."""
        self.connected = self.drains = False
        self.outbox = Outbox()
        self._attaching.clear()
        mine, self._mine, self.load = self._mine, {}, 0
        for request in mine.values():
            request.settle()
            if not request.complete:
                self._home.returned(request, self, now)

    def apply(self, message: scheduler_pb2.ServeResponse, now: float) -> None:
        """Takes a message of the scheduler. Raises PROTOCOL where the stream cannot be trusted any more."""
        if message.models_changed:
            self.models = {model.name: model for model in message.models}
            self._home.changed(self, now)
        for started in message.started:
            if (request := self._mine.get(started.handle)) is not None:
                self._attaching.discard(started.handle)
                self._home.began(request, self, now)
                request.start(started, self.models.get(started.model))
        scores = self._apply_logprobs(message.logprobs) if message.logprobs else {}
        self._apply_tokens(message, scores, now)
        for embedding in message.embeddings:
            if (request := self._mine.get(embedding.handle)) is not None:
                request.accept_embedding(embedding.values)
        for ended in message.ended:
            if (request := self._mine.get(ended.handle)) is not None:
                self._apply_end(request, ended, now)

    def _apply_end(self, request: OpenRequest, ended: scheduler_pb2.ChoiceEnd, now: float) -> None:
        reason = ended.error.reason
        if reason == Reason.DRAINING.name:  # it takes nothing new: another one does, or the next
            self.drains = True
            self._give_back(request, now)
        elif reason == Reason.NOT_FOUND.name and request.handle in self._attaching:
            self._give_back(request, now)  # to go on from what is here
        elif reason and not self._failed(request, ended, now):
            request.accept_end(ended)
            if request.error is not None:
                self.cancel(request)  # what its other choices still hold
        elif not reason:
            request.accept_end(ended)

    def _give_back(self, request: OpenRequest, now: float) -> None:
        self._drop(request)
        request.may_run_at = ""
        self._home.returned(request, self, now)

    def _failed(self, request: OpenRequest, ended: scheduler_pb2.ChoiceEnd, now: float) -> bool:
        """Whether an error is nothing to the request, because it goes on elsewhere."""
        if not self._home.refused(request, self, QuireError.from_detail(ended.error), now):
            return False
        self._drop(request)
        return True

    def _drop(self, request: OpenRequest) -> bool:
        """The scheduler has a request no more. Whether it had."""
        self._attaching.discard(request.handle)
        if self._mine.pop(request.handle, None) is None:
            return False
        self.load -= len(request.choices)
        return True

    def _apply_tokens(
        self, message: scheduler_pb2.ServeResponse, scores: dict[tuple[int, int], list[Score]], now: float
    ) -> None:
        ids, offset = list(message.token_ids), 0
        columns = (message.handles, message.choices, message.positions, message.token_counts)
        if len({len(column) for column in columns}) != 1 or sum(message.token_counts) != len(ids):
            raise QuireError(Reason.PROTOCOL, "the scheduler sent columns of unequal length")
        for handle, choice, position, count in zip(*columns, strict=True):
            request = self._mine.get(handle)
            if request is not None:
                new_scores = scores.get((handle, choice), [])
                with self._failing(request):
                    new_ids = ids[offset : offset + count]
                    if not request.answered:
                        self._home.answered(request, self, now)
                    request.accept_tokens(choice, position, new_ids, new_scores[:count], now)
                    if request.unread > self._hold_tokens and not request.held:
                        request.held = True
                        self.hold(request, True)
                del new_scores[:count]
            offset += count

    def _apply_logprobs(self, entries: Iterable[scheduler_pb2.ChoiceLogprobs]) -> dict[tuple[int, int], list[Score]]:
        """Hands prompt scores on and returns the output's, by (handle, choice)."""
        output: dict[tuple[int, int], list[Score]] = {}
        for entry in entries:
            request = self._mine.get(entry.handle)
            if request is None:
                continue
            with self._failing(request):
                if entry.prompt.chosen:
                    request.accept_prompt_scores(entry.prompt_start, unpack(entry.prompt))
                output.setdefault((entry.handle, entry.choice), []).extend(unpack(entry.output))
        return output

    @contextlib.contextmanager
    def _failing(self, request: OpenRequest) -> Iterator[None]:
        """Turns an error about one request into that request's end."""
        try:
            yield
        except QuireError as error:
            log.error("request failed", extra={"request_id": request.request_id, "error": error.message})
            request.fail(error)
            self.cancel(request)


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
