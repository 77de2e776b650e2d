"""Generates quire/v1 from protos/: as a build hook of the package, and by hand with --check or without.

`python tools/build_protos.py` writes the stubs; `--check` fails where they differ from what would be written.
"""

from __future__ import annotations

import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand, without the build backend
    BuildHookInterface = object


def generate(out: Path) -> list[Path]:
    """Writes messages, typed stubs and package markers below `out` and returns the files."""
    protos = sorted((ROOT / "protos" / "quire").rglob("*.proto"))
    names = [str(p.relative_to(ROOT / "protos")) for p in protos]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}"]
    command += [f"--{kind}={out}" for kind in ("python_out", "grpc_python_out", "mypy_out", "mypy_grpc_out")]
    # The mypy plugins are console scripts beside this interpreter.
    env_path = str(Path(sys.executable).parent)
    import os

    subprocess.run(
        [*command, *names], check=True, env={**os.environ, "PATH": env_path + os.pathsep + os.environ["PATH"]}
    )
    package = out / "quire" / "v1"
    (package / "__init__.py").write_text('"""Generated from protos/quire/v1 by the build; never edited."""\n')
    return sorted(p for p in package.iterdir() if p.is_file())


class CustomBuildHook(BuildHookInterface):  # type: ignore[misc, valid-type]
    """Runs the generator before a wheel or an editable install is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        generate(ROOT)


def main() -> int:
    if "--check" not in sys.argv[1:]:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        fresh = generate(Path(scratch))
        target = ROOT / "quire" / "v1"
        stale = [
            p.name
            for p in fresh
            if not (target / p.name).exists() or not filecmp.cmp(p, target / p.name, shallow=False)
        ]
    if stale:
        print(f"quire/v1 differs from protos/ in {', '.join(stale)}: run `make protos`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
