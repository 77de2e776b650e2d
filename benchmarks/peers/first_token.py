"""How long a new request waits for its first token while others run, as its client sees it over gRPC."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from statistics import median

from benchmarks.peers.contestants import Endpoint
from benchmarks.peers.processes import PeerError
from quire.bench.clients import Ask, GrpcClient, Manner
from quire.bench.measures import Sample
from quire.bench.workload import Request, prompt_text

TIMEOUT_SECONDS = 600.0
PROBE_OUTPUT = 4  # tokens; enough that the first one is not the last one as well


@dataclass(frozen=True, slots=True)
class NewcomerLoad:
    """`running` requests decode all the time; then `probes` new ones come, one after the other."""

    running: int = 8
    running_output: int = 4096  # tokens; none of them may end meanwhile, or its successor's prompt is measured too
    prompt: int = 128
    output: int = 64  # of the engine's own measurement
    probes: int = 20
    pause_seconds: float = 0.3  # between a probe's end and the next one


def waited(endpoint: Endpoint, load: NewcomerLoad, seed: int) -> float:
    """Median seconds from sending a new request to its first token. Raises PeerError where a request failed."""
    return median(asyncio.run(_first_tokens(endpoint, load, seed)))


async def _first_tokens(endpoint: Endpoint, load: NewcomerLoad, seed: int) -> list[float]:
    async with GrpcClient(endpoint.grpc, Manner(endpoint.model, TIMEOUT_SECONDS)) as client:

        async def ask(number: int, output: int) -> Sample:
            request = Request(number, 0.0, load.prompt, output)
            return await client.ask(Ask(prompt_text(request, seed), output, time.monotonic()))

        running = [asyncio.create_task(ask(number, load.running_output)) for number in range(load.running)]
        try:
            await ask(load.running, PROBE_OUTPUT)  # comes after the running ones' prompts, and warms up
            found = []
            for number in range(load.probes):
                await asyncio.sleep(load.pause_seconds)
                sample = await ask(load.running + 1 + number, PROBE_OUTPUT)
                if sample.error is not None:
                    raise PeerError(f"a new request failed: {sample.error}")
                found.append(sample.arrivals[0] - sample.start)
            if ended := sum(task.done() for task in running):
                raise PeerError(f"{ended} of the running requests ended early")
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    return found
