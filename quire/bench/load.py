"""Sends requests: a fixed number at a time (closed loop), or each when it is due (open loop)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from quire.bench.clients import Ask, Client
from quire.bench.measures import Sample
from quire.bench.workload import Request, prompt_text

Done = Callable[[Sample], None]
"""Called with each finished request."""


async def closed_loop(client: Client, requests: Sequence[Request], concurrency: int, seed: int, done: Done) -> None:
    """Keeps `concurrency` requests running until all were sent and answered."""
    prompts = [(prompt_text(request, seed), request.output_tokens) for request in requests]
    waiting = iter(prompts)

    async def user() -> None:
        for prompt, output_tokens in waiting:
            done(await client.ask(Ask(prompt, output_tokens, time.monotonic())))

    async with asyncio.TaskGroup() as users:
        for _ in range(min(concurrency, len(prompts))):
            users.create_task(user())


async def open_loop(client: Client, requests: Sequence[Request], seed: int, done: Done) -> None:
    """Sends each request when it is due, however many are still running."""
    asks = [(request.arrival, prompt_text(request, seed), request.output_tokens) for request in requests]
    start = time.monotonic()

    async def send(ask: Ask) -> None:
        done(await client.ask(ask))

    async with asyncio.TaskGroup() as running:
        for arrival, prompt, output_tokens in asks:
            due = start + arrival
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            running.create_task(send(Ask(prompt, output_tokens, due)))
