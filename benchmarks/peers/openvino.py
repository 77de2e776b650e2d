"""OpenVINO GenAI's continuous batching as a contestant, in one weight format. It has no server of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.peers.contestants import DRIVERS, MEASURE_SECONDS, Conditions, EngineLoad
from benchmarks.peers.formats import gguf
from benchmarks.peers.install import OPENVINO, install, python_of
from benchmarks.peers.parse import last_json
from benchmarks.peers.processes import run
from benchmarks.peers.samples import Measured


@dataclass(frozen=True, slots=True)
class OpenVino:
    """An engine."""

    conditions: Conditions
    model: Path
    name: str
    facts: Mapping[str, str]

    def measure(self, load: EngineLoad) -> Measured:
        given = json.dumps(asdict(load) | {"threads": self.conditions.threads})
        command: list[str | Path] = [python_of(OPENVINO), DRIVERS / "openvino_driver.py", self.model, given]
        found = last_json(run(command, self.conditions.logs / "openvino.log", MEASURE_SECONDS))
        return Measured(found["figures"], {**self.facts, **found["facts"]})


def openvino(conditions: Conditions, weights: str, quantizer: Path) -> OpenVino:
    """Installs it and makes its model file where that is needed. Raises PeerError."""
    version = install(OPENVINO)["openvino-genai"]
    facts = {"version": version, "weights": weights, "threads": str(conditions.threads)}
    return OpenVino(conditions, gguf(weights, quantizer, conditions.threads), f"openvino {weights}", facts)
