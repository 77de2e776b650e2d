"""What a contestant is: an engine that is measured alone, a server that is measured under load, or both."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.peers.samples import Measured

MEASURE_SECONDS = 1800.0
START_SECONDS = 1200.0  # vLLM compiles its model at its first start
DRIVERS = Path(__file__).parent / "drivers"  # scripts that run in the peers' environments


@dataclass(frozen=True, slots=True)
class Conditions:
    """What is the same for every contestant of a run."""

    cpus: tuple[int, ...]  # that everything runs on; one compute thread on each
    logs: Path
    port: int  # first of a range that is free on 127.0.0.1

    @property
    def threads(self) -> int:
        return len(self.cpus)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Random prompts. The best of `repeat` runs within one process counts: what disturbs a run only slows it down."""

    batches: tuple[int, ...] = (1, 8, 16, 32)
    prompt: int = 128  # tokens of each sequence
    output: int = 64
    prefill: int = 512  # tokens of the single prompt that the prefill is measured with
    repeat: int = 3


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens."""

    http: str  # base URL of the OpenAI API, up to and with /v1
    model: str
    grpc: str = ""  # host:port, where it speaks Quire's own API too


class Engine(Protocol):
    """Measured without a server, model loading excluded."""

    @property
    def name(self) -> str: ...

    def measure(self, load: EngineLoad) -> Measured:
        """Figures `decode B` for each batch, `prefill BxP` for the prompts of each batch, and `prefill P` for one
        long prompt; tokens per second.
        """
        ...


class Server(Protocol):
    """Started anew for each round, so that only one server is alive at any time."""

    @property
    def name(self) -> str: ...

    @property
    def facts(self) -> Mapping[str, str]: ...

    def serve(self) -> AbstractContextManager[Endpoint]: ...
