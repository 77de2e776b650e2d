"""Finds functions that the linker could take from one instruction set for all: `python tools/isa_symbols.py`.

An inline function of a header (std::vector's, say) that a kernel does not inline is emitted as a weak symbol, compiled
for the kernel's instruction set. Of all copies the linker keeps one for everybody, and a machine without that set dies
of it. So objects of every set but the portable one may define no weak function.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import build_native

BASELINE = "kernels_portable.dir"


def listing(path: Path) -> str:
    """What an object file defines: "ADDRESS TYPE NAME" a line."""
    command = ["nm", "--defined-only", "--demangle", path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def weak_functions(listed: str) -> list[str]:
    lines = (line.split(maxsplit=2) for line in listed.splitlines())
    return sorted(name for _, kind, name in lines if kind == "W")


def objects(folder: Path) -> Iterator[Path]:
    """The compiled kernels of every set that not all machines have. FileNotFoundError where nothing is compiled."""
    targets = sorted((folder / "CMakeFiles").glob("kernels_*.dir"))
    if not targets:
        raise FileNotFoundError(f"no compiled kernels in {folder}: run `make native`")
    for target in targets:
        if target.name != BASELINE:
            yield from sorted(target.rglob("*.o"))


def main() -> int:
    bad = False
    for path in objects(build_native.build_folder("native")):
        for name in weak_functions(listing(path)):
            print(f"{path.relative_to(build_native.ROOT)} defines {name}: inline it, or keep it out of the kernels")
            bad = True
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
