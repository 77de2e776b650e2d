"""One reader's way through a request: from what is known of it to events, each once. It finds stop strings."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from services.gateway.deltas import DeltaMaker, Vocabulary, scored_prompt
from services.gateway.events import Embedded, Event, Finished, PromptScores, Started
from services.gateway.metrics import RequestMeter
from services.gateway.positions import Seen
from services.gateway.quota.quota import Grant
from services.gateway.requests import OpenRequest

INLINE_SCORES = 4096


@dataclass(frozen=True, slots=True)
class Opened:
    """A request with what makes text of it."""

    request: OpenRequest
    vocabulary: Vocabulary
    make_makers: Callable[[], list[DeltaMaker]]  # anew for each reader
    meter: RequestMeter
    grant: Grant
    created: int  # Unix seconds
    digest: bytes  # of what the client asked for
    keep_special: bool


class Reading:
    """A Reader. Begins at the first event, or behind what its client has."""

    def __init__(self, opened: Opened, seen: Sequence[Seen] | None = None, *, kept: bool = False) -> None:
        """`seen` has an entry per choice. `kept` is what clients are told: whether they may come back."""
        self.opened, self.request = opened, opened.request
        self._makers = opened.make_makers()
        self._kept = kept
        self._begun = self._embedded = False
        self._skips = dict(enumerate(seen or ()))
        self._scores: PromptScores | None = None
        self._scores_sent = seen is not None  # what goes ahead of tokens came with the first event
        self._changed = asyncio.Event()
        self._changed.set()
        self.finished = False
        self.request.readers.append(self)

    @property
    def unread(self) -> int:
        return sum([maker.unread for maker in self._makers])

    def taken(self, choice: int) -> int:
        return self._makers[choice].taken

    def wake(self) -> None:
        self._changed.set()

    async def changed(self) -> None:
        """Returns once something happened since the last return. Makes the prompt's scores once they are complete."""
        await self._changed.wait()
        self._changed.clear()
        await self._score_prompt()

    def close(self) -> None:
        """Reads no more. Idempotent."""
        if self in self.request.readers:
            self.request.readers.remove(self)

    def advance(self) -> tuple[list[Event], list[int]]:
        """All new events, `Finished` behind the last delta; and the choices that ended here, by a stop string."""
        request, events, stopped = self.request, list[Event](), list[int]()
        if not self._begun and request.started is not None:
            self._begun = True
            events.append(_started(self.opened, self._kept))
        if self._scores is not None and not self._scores_sent:
            self._scores_sent = True
            events.append(self._scores)
        if request.embedding is not None and not self._embedded:
            self._embedded = True
            events.append(Embedded(request.embedding))
        for maker, choice in zip(self._makers, request.choices, strict=True):
            if (seen := self._skips.get(choice.index)) is not None:
                if not self._begun or (delta := maker.skip(seen)) is None:
                    continue
                del self._skips[choice.index]
                events.append(delta)
            if (delta := maker.take()) is not None:
                events.append(delta)
            if choice.ended_by_gateway:
                choice.ended_by_gateway = False
                stopped.append(choice.index)
        if not self.finished and all(maker.finished for maker in self._makers):
            self.finished = True
            told = [maker.reasoning_tokens for maker in self._makers if maker.reasoning_tokens is not None]
            events.append(replace(usage_of(request), reasoning_tokens=sum(told) if told else None))
        return events, stopped

    async def _score_prompt(self) -> None:
        """Beside the event loop where they are many."""
        request = self.request
        if self._scores is not None or not request.wants_prompt_scores or self._scores_sent:
            return
        if request.started is not None and request.prompt_scored:
            width = 1 + request.template.logprobs.prompt_count
            make = functools.partial(scored_prompt, self.opened.vocabulary, request.prompt_ids, request.prompt_scores)
            large = width * len(request.prompt_ids) > INLINE_SCORES
            self._scores = PromptScores(await asyncio.to_thread(make) if large else make())


def usage_of(request: OpenRequest) -> Finished:
    """What the request has used so far."""
    output = sum(len(choice.output) for choice in request.choices)
    cached = request.started.cached_tokens if request.started is not None else 0
    return Finished(len(request.prompt_ids), output, cached)


def _started(opened: Opened, kept: bool) -> Started:
    request = opened.request
    headers: Mapping[str, str] = opened.grant.headers
    return Started(
        request_id=request.request_id,
        model=request.model.name,
        created=opened.created,
        prompt_token_ids=tuple(request.prompt_ids),
        cached_tokens=request.started.cached_tokens if request.started is not None else 0,
        seed=request.template.sampling.seed,
        headers=headers,
        kept=kept,
    )
