"""Runs one HTTP request's prompts side by side and gathers their events."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from quire.v1.types_pb2 import FinishReason
from services.common.errors import QuireError, Reason
from services.gateway.events import Delta, Event, Finished, PromptScores, ScoredToken, Started, parts_of
from services.gateway.http.ports import Generation
from services.gateway.output.parts import Message, Part, fold


async def merge(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Event], None]:
    """(index of the prompt, event) of all generations as they come; the first failure ends them all.

    A generation is read only as fast as the result: at most one event of each waits. Close the iterator to end them.
    """
    if len(generations) == 1:
        async with aclosing(generations[0]) as only:
            async for event in only:
                yield 0, event
        return
    ready: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue(maxsize=1)

    async def pump(index: int, generation: Generation) -> None:
        try:
            async with aclosing(generation):
                async for event in generation:
                    await ready.put((index, event))
        except Exception as error:
            await ready.put((index, error))
        else:
            await ready.put((index, None))

    tasks = [asyncio.create_task(pump(index, generation)) for index, generation in enumerate(generations)]
    running = len(tasks)
    try:
        while running:
            index, item = await ready.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class Choice:
    """One choice of a whole answer."""

    parts: list[Part] = field(default_factory=list)
    logprobs: list[ScoredToken] | None = None  # None where none were asked for
    last: Delta | None = None  # the delta that carries the finish reason

    @property
    def end(self) -> Delta:
        """The delta that carries the finish reason; `collect` returns no choice without one."""
        assert self.last is not None
        return self.last

    @property
    def message(self) -> Message:
        return fold(self.parts)


@dataclass(slots=True)
class Answer:
    """Everything about one prompt."""

    started: Started
    choices: list[Choice]
    finished: Finished
    prompt_scores: tuple[ScoredToken, ...] | None = None


async def collect(events: AsyncIterator[tuple[int, Event]], prompts: int, choices: int) -> list[Answer]:
    """Whole answers, one per prompt. An answer that ends without its finish reasons is an error."""
    started: dict[int, Started] = {}
    scores: dict[int, tuple[ScoredToken, ...]] = {}
    finished: dict[int, Finished] = {}
    # Filled as choices appear: nothing may be allocated by a count that the engine has not admitted yet.
    table: defaultdict[tuple[int, int], Choice] = defaultdict(Choice)
    async for prompt, event in events:
        if isinstance(event, Delta):
            choice = table[prompt, event.choice]
            choice.parts += parts_of(event)
            if event.logprobs is not None:
                choice.logprobs = [*(choice.logprobs or ()), *event.logprobs]
            if event.finish_reason is not None:
                choice.last = event
        elif isinstance(event, Started):
            started[prompt] = event
        elif isinstance(event, PromptScores):
            scores[prompt] = event.tokens
        elif isinstance(event, Finished):
            finished[prompt] = event
    ended = sum(choice.last is not None for choice in table.values())
    if len(finished) != prompts or ended != prompts * choices:
        raise cut_short()
    return [
        Answer(started[i], [table[i, k] for k in range(choices)], finished[i], scores.get(i)) for i in range(prompts)
    ]


def cut_short() -> QuireError:
    """The failure of a generation that just ended."""
    return QuireError(Reason.INTERNAL, "the answer ended without a finish reason")


def finish_reason(delta: Delta) -> str | None:
    """OpenAI's name of the reason; None while the choice goes on. Raises for ends that are no clean ends."""
    match delta.finish_reason:
        case None:
            return None
        case FinishReason.FINISH_REASON_STOP:
            return "tool_calls" if delta.called else "stop"
        case FinishReason.FINISH_REASON_LENGTH:
            return "length"
        case FinishReason.FINISH_REASON_CANCELLED:
            raise QuireError(Reason.CANCELLED, "the request was cancelled")
        case _:
            raise QuireError(Reason.INTERNAL, "the choice ended with a failure")
