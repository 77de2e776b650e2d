"""Server-sent events: what a surface makes of each event; after a failure what it makes of that, and never its end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.events import Delta, Embedded, Event, Finished, PromptScores, Started
from services.gateway.http.client_watch import ClientGone, ClientWatch
from services.gateway.http.errors import from_exception
from services.gateway.http.fanout import cut_short
from services.gateway.http.surface import Surface
from services.gateway.http.to_input import Job
from services.gateway.positions import Track, event_id


async def chunks(
    first: tuple[int, Event],
    rest: AsyncGenerator[tuple[int, Event], None],
    surface: Surface,
    job: Job,
    request_id: str,
    *,
    resumed: bool,
) -> AsyncGenerator[bytes, None]:
    """The bytes to send, one item per event that has something to tell; with its id where the stream is kept.

    Of one that is `resumed` the client has what stands before the place that it named: it is rendered for what follows
    from it, and not sent.
    """
    finished: list[Finished] = []
    ended_choices = 0
    track = Track(len(job.inputs) * job.choices_per_prompt)
    kept = isinstance(first[1], Started) and first[1].kept

    def named(data: bytes) -> bytes:
        if not (kept and data):
            return data
        return b"%sid: %s\n\n" % (data[:-1], event_id(request_id, track.seen).encode("ascii"))

    def render(prompt: int, event: Event) -> bytes:
        nonlocal ended_choices
        match event:
            case Delta():
                ended = event.finish_reason is not None
                ended_choices += ended
                track.take(prompt * job.choices_per_prompt + event.choice, event.length, ended)
                data = surface.delta(prompt, event)
                return b"" if event.seen else named(data)
            case Started():
                data = surface.opening(prompt, event)
                return b"" if resumed else named(data)
            case Finished():
                finished.append(event)
                return b""
            case PromptScores() | Embedded():
                raise AssertionError("prompt scores are refused when streaming, and vectors are not streamed")

    async with aclosing(rest):
        try:
            if data := render(*first):
                yield data
            async for prompt, event in rest:
                if data := render(prompt, event):
                    yield data
            if len(finished) != len(job.inputs) or ended_choices != len(job.inputs) * job.choices_per_prompt:
                raise cut_short()
            last = surface.closing(finished)
        except Exception as error:
            last = surface.failure(from_exception(error, job.names))
        yield last


def rate_headers(first: Event) -> Mapping[str, str]:
    """What the first event tells of the caller's rates."""
    return first.headers if isinstance(first, Started) else {}


class EventStream(Response):
    """Sends chunks as they come and ends their source as soon as the client goes."""

    media_type = "text/event-stream"

    def __init__(self, source: AsyncGenerator[bytes, None], watch: ClientWatch, headers: Mapping[str, str]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._source = source
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._watch.run(self._pump(send))
        except ClientGone:
            return  # nobody is left to be told

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._source) as source:
            async for data in source:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
