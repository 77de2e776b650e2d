"""Quire as a contestant: its engine alone, and its four services."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from benchmarks.peers.contestants import MEASURE_SECONDS, START_SECONDS, Conditions, Endpoint, EngineLoad
from benchmarks.peers.formats import MODEL, OWN_FORMAT
from benchmarks.peers.parse import engine_points, last_json
from benchmarks.peers.processes import run
from benchmarks.peers.samples import OURS, Measured

QUIRE = (sys.executable, "-m", "quire.cli")
DRAIN_SECONDS = 2


@dataclass(frozen=True, slots=True)
class Quire:
    """Both engine and server."""

    conditions: Conditions
    backend: str = "auto"
    dtype: str | None = None
    name: str = OURS
    facts: Mapping[str, str] = field(default_factory=lambda: {"weights": OWN_FORMAT})

    def measure(self, load: EngineLoad) -> Measured:
        report, figures = self._bench(load.batches, load.prompt, load.output, load.repeat)
        _, prefill = self._bench((1,), load.prefill, 2, load.repeat)
        figures[f"prefill {load.prefill}"] = prefill[f"prefill 1x{load.prefill}"]
        facts = {key: str(report[key]) for key in ("backend", "dtype", "device")}
        return Measured(figures, {**self.facts, **facts, "threads": str(self.conditions.threads)})

    def _bench(
        self, batches: tuple[int, ...], prompt: int, output: int, repeat: int
    ) -> tuple[dict[str, object], dict[str, float]]:
        command = [*QUIRE, "bench", "engine", *self.flags, "--json", "--threads", str(self.conditions.threads)]
        command += ["--batch", ",".join(map(str, batches)), "--repeat", str(repeat)]
        command += ["--prompt", str(prompt), "--output", str(output)]
        report = last_json(run(command, self.conditions.logs / "quire-engine.log", MEASURE_SECONDS))
        return report, engine_points(report, prompt)

    @property
    def flags(self) -> list[str]:
        chosen = ["--model", MODEL, "--backend", self.backend]
        return chosen + (["--dtype", self.dtype] if self.dtype else [])

    @contextmanager
    def serve(self) -> Iterator[Endpoint]:
        log, port = self.conditions.logs / "quire-up.log", self.conditions.port
        with tempfile.TemporaryDirectory() as run_folder:
            environment = {"QUIRE_RUN_DIR": run_folder}
            command = [*QUIRE, "up", *self.flags, "--detach", "--no-demo", "--spare-executors", "0"]
            command += ["--port-base", str(port), "--drain-seconds", str(DRAIN_SECONDS)]
            try:
                run(command, log, START_SECONDS, environment)
                yield Endpoint(http=f"http://127.0.0.1:{port + 1}/v1", model=MODEL, grpc=f"127.0.0.1:{port}")
            finally:
                run([*QUIRE, "down", "--now"], log, START_SECONDS, environment)
