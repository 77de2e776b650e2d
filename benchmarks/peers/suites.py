"""The suites: for each, what every contestant does in one run.

A suite maps contestants to functions that measure once; `alternate` calls them in turn, round after round.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.peers import first_token
from benchmarks.peers.contestants import MEASURE_SECONDS, Conditions, Endpoint, Engine, EngineLoad, Server
from benchmarks.peers.ours import QUIRE, Quire
from benchmarks.peers.parse import last_json, served
from benchmarks.peers.processes import PeerError, run, spinning
from benchmarks.peers.samples import BOUND, OURS, Measured, Record, Sample, bracketed
from quire.bench.measures import engine_bound

LEAST_REQUESTS = 8

Suite = Mapping[str, Callable[[int], Measured]]
"""By contestant, what measures it in the round of that number."""


@dataclass(frozen=True, slots=True)
class ServeLoad:
    """A closed loop of random prompts, `waves` requests for each place in it."""

    concurrency: tuple[int, ...] = (1, 8, 32)
    prompt: int = 128
    output: int = 64
    waves: int = 3


def alternate(name: str, suite: Suite, rounds: int, record: Record) -> None:
    """Measures every contestant of the suite in each round, Quire before and after each peer."""
    peers = [contestant for contestant in suite if contestant != OURS]
    for number in range(rounds):
        for contestant in bracketed(peers, number):
            started = time.monotonic()
            try:
                measured = suite[contestant](number)
            except ValueError as error:
                raise PeerError(f"{contestant}: {error}") from error
            took = time.monotonic() - started
            record.samples.append(Sample(name, contestant, number, round(took, 2), measured.figures))
            record.facts.setdefault(contestant, {}).update(measured.facts)
            shown = ", ".join(f"{figure} {value:.4g}" for figure, value in measured.figures.items())
            print(f"{name}, round {number + 1} of {rounds}, {contestant}: {shown}", file=sys.stderr, flush=True)


def engines(contestants: Sequence[Engine], load: EngineLoad) -> Suite:
    """Each engine alone: decode by batch size, prefill."""

    def measure(engine: Engine, number: int) -> Measured:
        return engine.measure(load)

    return {engine.name: partial(measure, engine) for engine in contestants}


def busy_neighbour(contestants: Sequence[Engine], load: EngineLoad) -> Suite:
    """Figure `kept`: the share of an engine's batch-1 rate that is left beside a busy process."""
    alone = replace(load, batches=(1,))

    def kept(engine: Engine, number: int) -> Measured:
        quiet = engine.measure(alone).figures["decode 1"]
        with spinning():
            beside = engine.measure(alone)
        busy = beside.figures["decode 1"]
        return Measured({"quiet": quiet, "busy": busy, "kept": busy / quiet}, beside.facts)

    return {engine.name: partial(kept, engine) for engine in contestants}


def servers(contestants: Sequence[Server], load: ServeLoad, conditions: Conditions) -> Suite:
    """Each server under one load generator over HTTP, and Quire over gRPC as well."""

    def measure(server: Server, number: int) -> Measured:
        figures: dict[str, float] = {}
        with server.serve() as endpoint:
            for at, concurrency in enumerate(load.concurrency):
                for api in ("http", "grpc") if endpoint.grpc else ("http",):
                    # Seeds that no other load on this server has: a cached prompt is not what is measured.
                    seed = 1000 * number + 4 * at + (2 if api == "grpc" else 0)
                    report = _load_generator(endpoint, api, concurrency, seed, load, conditions)
                    figures |= served(report, api, concurrency)
        return Measured(figures, dict(server.facts))

    return {server.name: partial(measure, server) for server in contestants}


def bound(quire: Quire, load: ServeLoad, repeat: int) -> Suite:
    """What Quire's engine could serve at most under the load of `servers`, if everything around it cost nothing."""

    def measure(number: int) -> Measured:
        engine = quire.measure(EngineLoad(load.concurrency, load.prompt, load.output, load.prompt, repeat))
        figures = {}
        for n in load.concurrency:
            prefill, decode = engine.figures[f"prefill {n}x{load.prompt}"], engine.figures[f"decode {n}"]
            figures[f"grpc output tok/s @{n}"] = engine_bound(load.prompt, load.output, prefill, decode)
        return Measured(figures, engine.facts)

    return {BOUND: measure}


def newcomers(quire: Quire, load: first_token.NewcomerLoad) -> Suite:
    """Quire alone: how long a new request waits for its first token beside running ones."""

    def measure(number: int) -> Measured:
        engine = quire.measure(EngineLoad((1, load.running), load.prompt, load.output, load.prompt, repeat=2)).figures
        with quire.serve() as endpoint:
            waited = first_token.waited(endpoint, load, seed=number)
        return Measured(
            {
                "first token ms": waited * 1e3,
                "engine's own ms": load.prompt / engine[f"prefill 1x{load.prompt}"] * 1e3,
                "step ms": load.running / engine[f"decode {load.running}"] * 1e3,
            },
            dict(quire.facts),
        )

    return {OURS: measure}


def memory_reads(quire: Quire, pairs: int) -> Suite:
    """Quire's decode at batch 1 against plain reads of as many bytes, interleaved in one process."""

    def measure(number: int) -> Measured:
        command = [QUIRE[0], "-m", "benchmarks.peers.memory_read", *quire.flags, "--pairs", str(pairs)]
        command += ["--threads", str(quire.conditions.threads)]
        figures = last_json(run(command, quire.conditions.logs / "memory-read.log", MEASURE_SECONDS))
        return Measured({name: float(value) for name, value in figures.items()}, dict(quire.facts))

    return {OURS: measure}


def _load_generator(
    endpoint: Endpoint, api: str, concurrency: int, seed: int, load: ServeLoad, conditions: Conditions
) -> dict[str, Any]:
    """The report of `quire bench serve`, in a process of its own."""
    command = [*QUIRE, "bench", "serve", "--json", "--model", endpoint.model, "--concurrency", str(concurrency)]
    if api == "http":
        command += ["--api", "openai", "--base-url", endpoint.http]
    else:
        command += ["--address", endpoint.grpc]
    command += ["--requests", str(max(LEAST_REQUESTS, load.waves * concurrency)), "--warmup", str(concurrency)]
    command += ["--prompt-tokens", str(load.prompt), "--output-tokens", str(load.output), "--seed", str(seed)]
    return last_json(run(command, conditions.logs / "load.log", MEASURE_SECONDS))
