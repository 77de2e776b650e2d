"""Generates quire/v1 from protos/: by the build backend, and by hand with --check or without.

`python tools/build_protos.py` writes the stubs; `--check` fails where they differ from what would be written.
"""

from __future__ import annotations

import filecmp
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def generate(out: Path) -> list[Path]:
    """Writes messages, typed stubs and package markers below `out` and returns the files."""
    protos = sorted((ROOT / "protos" / "quire").rglob("*.proto"))
    names = [str(p.relative_to(ROOT / "protos")) for p in protos]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}"]
    command += [f"--{kind}={out}" for kind in ("python_out", "grpc_python_out", "mypy_out", "mypy_grpc_out")]
    # The mypy plugins are console scripts beside this interpreter.
    path = str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"]
    subprocess.run([*command, *names], check=True, env={**os.environ, "PATH": path})
    package = out / "quire" / "v1"
    (package / "__init__.py").write_text('"""Generated from protos/quire/v1 by the build; never edited."""\n')
    return sorted(p for p in package.iterdir() if p.is_file())


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
