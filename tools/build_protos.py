"""Generates quire/v1 from protos/: by the build backend, and by hand with --check or without.

What is below protos/third_party goes to quire/v1/foreign.

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
FOREIGN = "quire/v1/foreign"


def generate(out: Path) -> list[Path]:
    """Writes messages, typed stubs and package markers below `out` and returns the files."""
    protos, foreign = ROOT / "protos", ROOT / "protos" / "third_party"
    names = [str(path.relative_to(protos)) for path in sorted((protos / "quire").rglob("*.proto"))]
    names += [f"{FOREIGN}/{path.name}" for path in sorted(foreign.glob("*.proto"))]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{protos}", f"-I{FOREIGN}={foreign}"]
    command += [f"--{kind}={out}" for kind in ("python_out", "grpc_python_out", "mypy_out", "mypy_grpc_out")]
    # The mypy plugins are console scripts beside this interpreter.
    path = str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"]
    subprocess.run([*command, *names], check=True, env={**os.environ, "PATH": path})
    package = out / "quire" / "v1"
    (package / "__init__.py").write_text('"""Generated from protos/quire/v1 by the build; never edited."""\n')
    (out / FOREIGN / "__init__.py").write_text('"""Generated from protos/third_party by the build; never edited."""\n')
    return sorted(path for path in package.rglob("*.py*") if path.suffix in (".py", ".pyi"))


def main() -> int:
    if "--check" not in sys.argv[1:]:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        names = [path.relative_to(scratch) for path in generate(Path(scratch))]
        stale = [
            str(name)
            for name in names
            if not (ROOT / name).exists() or not filecmp.cmp(Path(scratch) / name, ROOT / name, shallow=False)
        ]
    if stale:
        print(f"quire/v1 differs from protos/ in {', '.join(stale)}: run `make protos`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
