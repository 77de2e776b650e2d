"""Writes the lock files from pyproject.toml with pip-compile; run by `make lock`.

A build of torch for one kind of machine carries a local version ("+cpu"); the lock names the release alone, so that
every machine takes the build that it is offered.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = {
    "requirements.lock": ("torch", "test"),  # development, tests and `make up`
    "requirements-light.lock": ("oidc",),  # images of gateway, scheduler and kvmanager
    "requirements-executor.lock": ("torch", "cuda"),  # image of the executor
}
OPTIONS = [
    "--quiet",
    "--no-header",
    "--no-annotate",
    "--strip-extras",
    "--allow-unsafe",
    *(f"--no-emit-{what}" for what in ("index-url", "trusted-host", "find-links", "options")),
]


def compile_lock(name: str, extras: tuple[str, ...], upgrade: list[str]) -> None:
    """Writes one lock file. Versions already in it stay unless `upgrade` says otherwise."""
    path = ROOT / name
    command = [sys.executable, "-m", "piptools", "compile", *OPTIONS, *upgrade, f"--output-file={path}"]
    command += [f"--extra={extra}" for extra in extras]
    if name != "requirements.lock":
        command.append("--constraint=requirements.lock")
    subprocess.run([*command, "pyproject.toml"], cwd=ROOT, check=True)
    lines = [re.sub(r"^([^#\s]+==[^+\s]+)\+\w+", r"\1", line) for line in path.read_text().splitlines()]
    wanted = " and ".join(extras) or "no extras"
    header = f"# Written by `make lock` from pyproject.toml ({wanted}); do not edit."
    path.write_text("\n".join([header, *(line for line in lines if line and not line.startswith("#"))]) + "\n")


if __name__ == "__main__":
    for lock, with_extras in LOCKS.items():
        compile_lock(lock, with_extras, sys.argv[1:])
