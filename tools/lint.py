"""All static checks, one after the other; run by `make lint`. Prints only what is wrong; exits with 1 if anything is.

`--skip a,b` leaves checks out by name.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
BASE = "main"  # the branch that wires must stay compatible with

LINE_CAP = 400
# One idea per file. A file may exceed the cap only with its reason here.
LONGER: dict[str, str] = {}
CODE = {".py", ".cpp", ".h", ".c", ".proto"}
# A proto is read as one contract, and comments on each field take their room.
UNCAPPED = {".proto"}

# The repository names no folder of a particular machine. Assembled, so that this file passes its own check.
FOREIGN = re.compile(r"(?<![\w.$}])/(?:" + "|".join(("home/\\w", "Users/\\w", "root/", "work/", "opt/(?!venv)")) + ")")


def run(*command: str | Path) -> str:
    """Output of a command that failed; empty where it passed."""
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return "" if done.returncode == 0 else done.stdout.strip() or f"exit status {done.returncode}"


def tracked() -> Iterator[Path]:
    """Every file that git tracks or would."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in sorted(set(listed.stdout.decode().split("\0")) - {""}):
        if (ROOT / name).is_file():
            yield Path(name)


def check_breaking() -> str:
    """Wire compatibility with the base branch, where it exists and has protos."""
    for base in (f"origin/{BASE}", BASE):
        if not run("git", "cat-file", "-e", f"{base}:protos/buf.yaml"):
            commit = subprocess.run(["git", "rev-parse", base], cwd=ROOT, capture_output=True, text=True, check=True)
            return run(
                BIN / "buf", "breaking", "protos", "--against", f".git#ref={commit.stdout.strip()},subdir=protos"
            )
    return ""


def check_clang_format() -> str:
    sources = [path for path in tracked() if path.suffix in {".cpp", ".h"}]
    complaints = run(BIN / "clang-format", "--dry-run", "--Werror", *sources)
    files = sorted({str(path) for path in sources if f"{path}:" in complaints})
    return f"{' '.join(files)}: run `make format`" if files else complaints


def check_line_cap() -> str:
    problems = []
    for path in tracked():
        if path.suffix in CODE - UNCAPPED:
            lines = len((ROOT / path).read_text().splitlines())
            if lines > LINE_CAP and str(path) not in LONGER:
                problems.append(f"{path}: {lines} lines, the cap is {LINE_CAP}: is it one idea?")
    problems += [f"tools/lint.py: {name} has an exception but is gone" for name in LONGER if not (ROOT / name).exists()]
    return "\n".join(problems)


def check_foreign_paths() -> str:
    problems = []
    for path in tracked():
        try:
            lines = (ROOT / path).read_text().splitlines()
        except UnicodeDecodeError:
            continue
        problems += [f"{path}:{n}: names a folder of one machine" for n, x in enumerate(lines, 1) if FOREIGN.search(x)]
    return "\n".join(problems)


CHECKS: dict[str, Callable[[], str]] = {
    "ruff-format": lambda: run(BIN / "ruff", "format", "--check", "."),
    "ruff-check": lambda: run(BIN / "ruff", "check", "."),
    "clang-format": check_clang_format,
    "isa-symbols": lambda: run(sys.executable, "tools/isa_symbols.py"),
    "stubs": lambda: run(sys.executable, "tools/build_protos.py", "--check"),
    "mypy": lambda: run(BIN / "mypy"),
    "buf-lint": lambda: run(BIN / "buf", "lint", "protos"),
    "buf-breaking": check_breaking,
    "hadolint": lambda: run(BIN / "hadolint", "Dockerfile"),
    "line-cap": check_line_cap,
    "foreign-paths": check_foreign_paths,
}


def main(argv: list[str]) -> int:
    skipped = set(argv[argv.index("--skip") + 1].split(",")) if "--skip" in argv else set()
    if unknown := skipped - set(CHECKS):
        print(f"lint: no such check: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    failed = []
    for name, check in CHECKS.items():
        if name in skipped:
            continue
        started = time.monotonic()
        problem = check()
        print(f"lint: {name}: {'FAILED' if problem else 'ok'} ({time.monotonic() - started:.1f} s)", flush=True)
        if problem:
            failed.append(name)
            print(problem, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
