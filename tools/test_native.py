"""Runs the tests of native code on builds made to find faults: `python tools/test_native.py [PATHS...]`.

First with the address and undefined-behavior sanitizers, then with the thread sanitizer (those of tests/native, which
use several threads), then with the AVX-512 kernels compiled for AVX2 through SIMDe, so that any x86 machine runs them.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import build_native

PATHS = ["tests/kernels", "tests/native"]
RUNTIMES = {"sanitize": ("libasan.so", "libubsan.so"), "races": ("libtsan.so",)}
"""Libraries of a variant's sanitizers."""
# Python itself frees little at its end, so leaks are not looked for.
SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}


def compiler(folder: Path) -> str:
    found = re.search(r"^CMAKE_CXX_COMPILER:\w+=(.+)$", (folder / "CMakeCache.txt").read_text(), re.M)
    assert found
    return found[1]


def runtimes(cxx: str, names: Sequence[str]) -> str:
    """What must be loaded before Python: the sanitizers' libraries, and libstdc++, whose functions they wrap."""
    printed = (
        subprocess.run([cxx, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        for name in (*names, "libstdc++.so.6")
    )
    return " ".join(str(Path(one.stdout.strip()).resolve()) for one in printed)


def run(variant: str, paths: list[str]) -> int:
    """Compiles the variant, runs the tests on it and returns pytest's exit status."""
    build_native.build(variant)
    folder = build_native.build_folder(variant)
    (module,) = folder.glob("_native*.so")
    environment = dict(os.environ)
    if variant in RUNTIMES:
        environment |= {**SANITIZER_OPTIONS, "LD_PRELOAD": runtimes(compiler(folder), RUNTIMES[variant])}
    command = [sys.executable, "-m", "pytest", "-p", "tests.fixtures.other_native", "--native", module]
    # What a sanitizer says at the end of a process must not end in pytest's own files.
    command += ["--capture", "sys"]
    return subprocess.run([*command, "-m", "not full", *paths], cwd=build_native.ROOT, env=environment).returncode


def main(paths: list[str]) -> int:
    status = run("sanitize", paths or PATHS)
    status = run("races", paths or ["tests/native"]) or status
    if platform.machine() not in {"x86_64", "AMD64"}:
        print("The AVX-512 kernels are not tested: emulating them needs an x86 machine")
        return status
    return run("emulate", paths or PATHS) or status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
