"""Open requests: every generated id and the next position of each choice, and who reads them.

A token is (request, choice, output position): lower positions are dropped, a gap is an error.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

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
    scores: list[Score] = field(default_factory=list)  # of output[scores_from:], where asked for
    scores_from: int = 0  # what is before is not kept any more
    end: types_pb2.FinishReason.ValueType | None = None
    stop_token_id: int | None = None
    cumulative_logprob: float | None = None
    ended_by_gateway: bool = False

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

    def since(self, position: int, most: int | None = None) -> tuple[list[int], list[Score]]:
        """Tokens from `position` on, at most so many, and their scores where they are kept."""
        end = len(self.output) if most is None else position + most
        return self.output[position:end], self.scores[position - self.scores_from : end - self.scores_from]

    def forget_scores(self, before: int) -> None:
        """Frees the scores of earlier positions: whoever reads has them."""
        if before > self.scores_from:
            del self.scores[: before - self.scores_from]
            self.scores_from = before

    def cut(self, length: int) -> None:
        """Ends the choice behind that many tokens: a stop string was found."""
        del self.output[length:]
        del self.scores[max(0, length - self.scores_from) :]
        self.ended_by_gateway = self.end is None
        self.end, self.stop_token_id = types_pb2.FINISH_REASON_STOP, None


class Reader(Protocol):
    """Whoever reads a request."""

    @property
    def unread(self) -> int:
        """Tokens that it has not taken yet."""

    def taken(self, choice: int) -> int:
        """Tokens of a choice that it has."""

    def wake(self) -> None:
        """Something happened."""


class OpenRequest:
    """One request between its submission and its last event. Changed by the schedulers' links and by its readers."""

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
        self.may_run_at = ""  # the scheduler that had it last
        self.attempts = 0  # how often a scheduler refused it and it was given to one again
        self.answered = False  # whether tokens came
        self.readers: list[Reader] = []
        self.on_change: Callable[[], None] | None = None
        self._on_tokens = on_tokens

    @property
    def unread(self) -> int:
        """Tokens that the slowest reader has before it; all of them where nobody reads."""
        if len(self.readers) == 1:
            return self.readers[0].unread
        return max((reader.unread for reader in self.readers), default=sum(len(c.output) for c in self.choices))

    @property
    def complete(self) -> bool:
        """Whether no more can come: every choice ended, or the request failed."""
        return self.error is not None or all(choice.end is not None for choice in self.choices)

    @property
    def prompt_scored(self) -> bool:
        return not self.wants_prompt_scores or len(self.prompt_scores) >= len(self.prompt_ids) - 1

    @property
    def can_be_attached_to(self) -> bool:
        """Whether a scheduler keeps it where its stream breaks; what tells more than tokens is computed again."""
        tells_more = self.wants_scores or self.wants_prompt_scores or self.template.beam_width or self.template.pooling
        return self.template.keep_ms > 0 and not tells_more

    def wake(self) -> None:
        """Lets readers look again."""
        for reader in self.readers:
            reader.wake()
        if self.on_change is not None:
            self.on_change()

    def forget_read_scores(self) -> None:
        """Frees scores that all readers have."""
        for choice in self.choices:
            choice.forget_scores(min(reader.taken(choice.index) for reader in self.readers))

    def start(self, started: scheduler_pb2.RequestStarted, model: types_pb2.ModelDescription | None = None) -> None:
        """The prompt was placed, on `model` where that is known; later starts (after a loss) change nothing."""
        if self.started is None:
            self.started = started
            if model is not None:  # the one picked for an alias stays, also where the request is submitted again
                self.model, self.template.model = model, model.name
            self.wake()

    def accept_prompt_scores(self, start: int, scores: Sequence[Score]) -> None:
        """Scores of prompt tokens from index `start` (1 or more) on."""
        skipped = len(self.prompt_scores) + 1 - start
        if skipped < 0:
            raise QuireError(Reason.PROTOCOL, f"log probabilities of prompt token {start + skipped} are missing")
        self.prompt_scores.extend(scores[skipped:])

    def accept_embedding(self, values: Iterable[float]) -> None:
        """The prompt's vector, which comes before the end."""
        self.embedding = tuple(values)
        self.wake()

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
            self.wake()

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
            self.wake()

    def fail(self, error: QuireError) -> None:
        """Ends the request with an error, which its readers meet behind the tokens that came before."""
        if self.error is None:
            self.error = error
            self.wake()

    def settle(self) -> None:
        """Ends choices whose last token says so, where the word that they ended was lost with the scheduler."""
        for choice in self.choices:
            if choice.end is not None or not choice.output:
                continue
            if choice.output[-1] in self.end_ids:
                choice.end, choice.stop_token_id = types_pb2.FINISH_REASON_STOP, choice.output[-1]
            elif len(choice.output) >= self.template.stop.max_tokens:
                choice.end = types_pb2.FINISH_REASON_LENGTH
        self.wake()

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

    def to_attach(self) -> scheduler_pb2.Attach:
        """What a scheduler that may still compute it must know."""
        positions = [len(choice.output) for choice in self.choices]
        return scheduler_pb2.Attach(
            handle=self.handle, tenant=self.tenant, request_id=self.request_id, next_positions=positions
        )


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

    def remove(self, request: OpenRequest) -> None:
        """Forgets a request and its id. Idempotent."""
        if self._by_handle.pop(request.handle, None) is not None:
            self.release(request.tenant, request.request_id)

    async def empty(self) -> None:
        """Returns once no request is open."""
        await self._emptied.wait()
