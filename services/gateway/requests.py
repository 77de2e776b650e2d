"""Open requests: every generated id and the next position of each choice, and what the reader has not taken yet.

A token is (request, choice, output position): lower positions are dropped, a gap is an error.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.v1 import scheduler_pb2, types_pb2
from services.common.errors import QuireError, Reason

ERROR, CANCELLED = types_pb2.FINISH_REASON_ERROR, types_pb2.FINISH_REASON_CANCELLED


class Score(NamedTuple):
    """Log probability of one token as it came over the wire; `top` are alternatives, most likely first."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class OpenChoice:
    """Output of one choice."""

    index: int
    output: list[int] = field(default_factory=list)
    taken: int = 0  # tokens that the reader has
    scores: list[Score] = field(default_factory=list)  # of output[taken:], where asked for
    end: types_pb2.FinishReason.ValueType | None = None
    stop_token_id: int | None = None
    cumulative_logprob: float | None = None
    ended_by_gateway: bool = False

    @property
    def unread(self) -> int:
        return len(self.output) - self.taken

    def accept(self, position: int, ids: Sequence[int], scores: Sequence[Score]) -> int:
        """Appends the ids from `position` on that are new and returns their number. Raises PROTOCOL on a gap.

        What comes behind the end is dropped: tokens were under way when a stop string cut the output.
        """
        if self.end is not None:
            return 0
        skipped = len(self.output) - position
        if skipped < 0:
            raise QuireError(
                Reason.PROTOCOL, f"choice {self.index}: output position {len(self.output)} is missing before {position}"
            )
        if skipped >= len(ids):
            return 0
        self.output.extend(ids[skipped:])
        self.scores.extend(scores[skipped:])
        return len(ids) - skipped

    def take(self) -> tuple[list[int], list[Score]]:
        """What the reader has not seen yet."""
        ids, scores = self.output[self.taken :], self.scores
        self.taken, self.scores = len(self.output), []
        return ids, scores

    def cut(self, length: int) -> None:
        """Ends the choice behind that many tokens: a stop string was found."""
        del self.output[length:]
        self.taken = length
        self.scores = []
        self.ended_by_gateway = self.end is None
        self.end, self.stop_token_id = types_pb2.FINISH_REASON_STOP, None


class OpenRequest:
    """One request between its submission and its last event. Changed by the scheduler's link and by its reader."""

    def __init__(
        self,
        submit: scheduler_pb2.Submit,
        model: types_pb2.ModelDescription,
        end_ids: frozenset[int],
        arrived_at: float,
        deadline_at: float | None,
        on_tokens: Callable[[int, int, float], None],
    ) -> None:
        """`submit` lacks progress, and its times count from `arrived_at`. All times here are the event loop's clock.

        `on_tokens(choice, count, now)` is told of new tokens as they arrive.
        """
        self.template, self.model, self.end_ids = submit, model, end_ids
        self.arrived_at, self.deadline_at = arrived_at, deadline_at
        self.handle, self.tenant, self.request_id = submit.handle, submit.tenant, submit.request_id
        self.prompt_ids: list[int] = list(submit.prompt_token_ids)
        self.choices = [OpenChoice(index) for index in range(submit.choice_count)]
        self.wants_scores = submit.logprobs.HasField("output_count")
        self.wants_prompt_scores = submit.logprobs.HasField("prompt_count")
        self.prompt_scores: list[Score] = []  # of prompt tokens 1, 2, ...
        self.embedding: tuple[float, ...] | None = None  # of the prompt, where asked for
        self.started: scheduler_pb2.RequestStarted | None = None
        self.error: QuireError | None = None
        self.held = False
        self.parked_at: float | None = None  # since when no scheduler has it
        self._on_tokens = on_tokens
        self._changed = asyncio.Event()

    @property
    def unread(self) -> int:
        return sum(choice.unread for choice in self.choices)

    @property
    def complete(self) -> bool:
        """Whether no more can come: every choice ended, or the request failed."""
        return self.error is not None or all(choice.end is not None for choice in self.choices)

    @property
    def prompt_scored(self) -> bool:
        return not self.wants_prompt_scores or len(self.prompt_scores) >= len(self.prompt_ids) - 1

    async def changed(self) -> None:
        """Returns once something happened since the last return."""
        await self._changed.wait()
        self._changed.clear()

    def wake(self) -> None:
        """Lets the reader look again."""
        self._changed.set()

    def start(self, started: scheduler_pb2.RequestStarted, model: types_pb2.ModelDescription | None = None) -> None:
        """The prompt was placed, on `model` where that is known; later starts (after a loss) change nothing."""
        if self.started is None:
            self.started = started
            if model is not None:  # the one picked for an alias stays, also where the request is submitted again
                self.model, self.template.model = model, model.name
            self._changed.set()

    def accept_prompt_scores(self, start: int, scores: Sequence[Score]) -> None:
        """Scores of prompt tokens from index `start` (1 or more) on."""
        skipped = len(self.prompt_scores) + 1 - start
        if skipped < 0:
            raise QuireError(Reason.PROTOCOL, f"log probabilities of prompt token {start + skipped} are missing")
        self.prompt_scores.extend(scores[skipped:])

    def accept_embedding(self, values: Iterable[float]) -> None:
        """The prompt's vector, which comes before the end."""
        self.embedding = tuple(values)
        self._changed.set()

    def accept_tokens(self, index: int, position: int, ids: Sequence[int], scores: Sequence[Score], now: float) -> None:
        """Tokens of one choice. Raises PROTOCOL where something is missing."""
        if self.error is not None:
            return
        if not 0 <= index < len(self.choices):
            raise QuireError(Reason.PROTOCOL, f"tokens of choice {index}, which was not asked for")
        if self.started is None or not self.prompt_scored:
            raise QuireError(Reason.PROTOCOL, "tokens came before what goes ahead of them")
        if self.wants_scores and len(scores) != len(ids):
            raise QuireError(Reason.PROTOCOL, f"{len(ids)} tokens came with {len(scores)} log probabilities")
        count = self.choices[index].accept(position, ids, scores)
        if count:
            self._on_tokens(index, count, now)
            self._changed.set()

    def accept_end(self, ended: scheduler_pb2.ChoiceEnd) -> None:
        """The scheduler's word that a choice ended. A failed choice fails the request; behind that nothing counts."""
        if self.error is not None:
            return  # tokens were dropped since: what is there would pass for the whole
        if ended.reason == ERROR or (ended.reason == CANCELLED and ended.HasField("error")):
            self.fail(QuireError.from_detail(ended.error))
        elif ended.reason == CANCELLED:
            self.fail(QuireError(Reason.CANCELLED, "the request was cancelled"))
        elif not 0 <= ended.choice < len(self.choices) or not ended.reason:
            self.fail(QuireError(Reason.PROTOCOL, f"choice {ended.choice} ended with reason {ended.reason}"))
        elif self.template.pooling and self.embedding is None:
            self.fail(QuireError(Reason.PROTOCOL, "the prompt ended without its vector"))
        elif (choice := self.choices[ended.choice]).end is None:
            choice.end = ended.reason
            choice.stop_token_id = ended.stop_token_id if ended.HasField("stop_token_id") else None
            choice.cumulative_logprob = ended.cumulative_logprob if ended.HasField("cumulative_logprob") else None
            self._changed.set()

    def fail(self, error: QuireError) -> None:
        """Ends the request with an error, which its reader meets behind the tokens that came before."""
        if self.error is None:
            self.error = error
            self._changed.set()

    def drop_unread(self) -> None:
        """Frees what a reader that is gone will not take."""
        for choice in self.choices:
            choice.take()

    def settle(self) -> None:
        """Ends choices whose last token says so, where the word that they ended was lost with the scheduler."""
        for choice in self.choices:
            if choice.end is not None or not choice.output:
                continue
            if choice.output[-1] in self.end_ids:
                choice.end, choice.stop_token_id = types_pb2.FINISH_REASON_STOP, choice.output[-1]
            elif len(choice.output) >= self.template.stop.max_tokens:
                choice.end = types_pb2.FINISH_REASON_LENGTH
        self._changed.set()

    def to_submit(self, now: float) -> scheduler_pb2.Submit:
        """What a scheduler must know, with the output so far and the time left."""
        submit = scheduler_pb2.Submit()
        submit.CopyFrom(self.template)
        if self.deadline_at is not None:
            submit.deadline_ms = max(1, round((self.deadline_at - now) * 1000))
        if any(choice.output for choice in self.choices):
            submit.target_first_token_ms = 0  # it came
            submit.progress.extend(
                scheduler_pb2.ChoiceProgress(choice=c.index, token_ids=c.output, ended=c.end is not None)
                for c in self.choices
            )
            if self.prompt_scored:
                submit.logprobs.ClearField("prompt_count")
        elif submit.target_first_token_ms:
            waited = round((now - self.arrived_at) * 1000)
            submit.target_first_token_ms = max(1, submit.target_first_token_ms - waited)
        return submit


class RequestTable:
    """The open requests of this gateway, by handle and by request id. Ids of different tenants never meet."""

    def __init__(self) -> None:
        self._by_handle: dict[int, OpenRequest] = {}
        self._ids: set[tuple[str, str]] = set()  # tenant and request id
        self._handles = itertools.count(1)
        self._emptied = asyncio.Event()
        self._emptied.set()

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(list(self._by_handle.values()))

    def claim(self, tenant: str, request_id: str) -> int:
        """A new handle for a tenant's request id. ALREADY_EXISTS while a request of the tenant with that id runs."""
        if (tenant, request_id) in self._ids:
            raise QuireError(Reason.ALREADY_EXISTS, f"request_id: {request_id} is running", field="request_id")
        self._ids.add((tenant, request_id))
        self._emptied.clear()
        return next(self._handles)

    def release(self, tenant: str, request_id: str) -> None:
        """Gives a claimed id back. Idempotent."""
        self._ids.discard((tenant, request_id))
        if not self._ids:
            self._emptied.set()

    def add(self, request: OpenRequest) -> None:
        self._by_handle[request.handle] = request

    def get(self, handle: int) -> OpenRequest | None:
        return self._by_handle.get(handle)

    def named(self, tenant: str, request_ids: Collection[str]) -> list[OpenRequest]:
        """Those of a tenant's requests that have these ids."""
        return [one for one in self if one.tenant == tenant and one.request_id in request_ids]

    def remove(self, request: OpenRequest) -> None:
        """Forgets a request and its id. Idempotent."""
        if self._by_handle.pop(request.handle, None) is not None:
            self.release(request.tenant, request.request_id)

    async def empty(self) -> None:
        """Returns once no request is open."""
        await self._emptied.wait()
