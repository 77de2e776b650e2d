"""Who takes part in which suite, with which weights and under which load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.peers import suites
from benchmarks.peers.contestants import Conditions, Engine, EngineLoad, Server
from benchmarks.peers.first_token import NewcomerLoad
from benchmarks.peers.llama_cpp import LlamaCpp, llama_cpp
from benchmarks.peers.openvino import OpenVino, openvino
from benchmarks.peers.ours import Quire
from benchmarks.peers.suites import ServeLoad, Suite
from benchmarks.peers.vllm import Vllm, vllm

PEERS = ("llama.cpp", "openvino", "vllm")
LLAMA_WEIGHTS = ("Q4_0", "Q4_1", "Q8_0", "BF16")
LLAMA_SERVED = ("Q4_0", "BF16")
LLAMA_FASTEST = "Q4_0"
OPENVINO_WEIGHTS = ("Q4_0", "Q8_0")


@dataclass(frozen=True, slots=True)
class Loads:
    """How much each suite does in a round."""

    engine: EngineLoad
    serve: ServeLoad
    newcomer: NewcomerLoad
    memory_pairs: int


FULL = Loads(EngineLoad(), ServeLoad(), NewcomerLoad(), memory_pairs=30)
QUICK = Loads(
    EngineLoad(batches=(1, 8, 32), prompt=32, output=8, repeat=1),
    ServeLoad(prompt=32, output=8, waves=1),
    NewcomerLoad(prompt=32, output=8, probes=3),
    memory_pairs=3,
)


@dataclass(frozen=True, slots=True)
class LineUp:
    """The contestants of one run. Peers are installed, and their model files made, when they are first needed."""

    conditions: Conditions
    quire: Quire
    peers: tuple[str, ...]
    loads: Loads

    def suite(self, name: str) -> Suite:
        """A suite by its name. Raises PeerError where a peer cannot be set up."""
        return SUITES[name](self)

    def engine(self) -> Suite:
        engines: list[Engine] = [self.quire, *self._llama(LLAMA_WEIGHTS)]
        if "openvino" in self.peers:
            engines += [self._openvino(weights) for weights in OPENVINO_WEIGHTS]
        return suites.engines([*engines, *self._vllm()], self.loads.engine)

    def memory(self) -> Suite:
        return suites.memory_reads(self.quire, self.loads.memory_pairs)

    def serve(self) -> Suite:
        servers: list[Server] = [self.quire, *self._llama(LLAMA_SERVED), *self._vllm()]
        load = self.loads.serve
        bound = suites.bound(self.quire, load, self.loads.engine.repeat)
        return {**suites.servers(servers, load, self.conditions), **bound}

    def neighbour(self) -> Suite:
        return suites.busy_neighbour([self.quire, *self._llama((LLAMA_FASTEST,))], self.loads.engine)

    def newcomer(self) -> Suite:
        return suites.newcomers(self.quire, self.loads.newcomer)

    def _llama(self, weights: tuple[str, ...]) -> list[LlamaCpp]:
        return [llama_cpp(self.conditions, each) for each in weights] if "llama.cpp" in self.peers else []

    def _openvino(self, weights: str) -> OpenVino:
        return openvino(self.conditions, weights, llama_cpp(self.conditions, LLAMA_FASTEST).tools / "llama-quantize")

    def _vllm(self) -> list[Vllm]:
        return [vllm(self.conditions)] if "vllm" in self.peers else []


SUITES: dict[str, Callable[[LineUp], Suite]] = {
    "engine": LineUp.engine,
    "memory": LineUp.memory,
    "serve": LineUp.serve,
    "neighbour": LineUp.neighbour,
    "newcomer": LineUp.newcomer,
}
