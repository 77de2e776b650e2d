"""What compiling the native kernels needs from the system, checked and, where we may, installed; run by `make setup`.

To be run with the interpreter that the module is compiled for. Everything else comes as locked packages.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path


def missing(environment: Mapping[str, str], headers: Path) -> dict[str, str]:
    """What is not there, by the name of the Debian package that brings it."""
    compilers = [shlex.split(environment["CXX"])[0]] if environment.get("CXX") else ["c++", "g++", "clang++"]
    found = {}
    if not any(shutil.which(compiler, path=environment.get("PATH")) for compiler in compilers):
        found["g++"] = "a C++ compiler (GCC 11 or newer, or Clang 18 or newer)"
    if not (headers / "Python.h").exists():
        found[f"python{sys.version_info.major}.{sys.version_info.minor}-dev"] = "the C headers of this Python"
    return found


def install(packages: list[str]) -> None:
    """By apt, where that exists and we are root; what it could not do is seen by asking again."""
    if shutil.which("apt-get") and os.geteuid() == 0:
        print(f"setup: installing {' '.join(packages)}")
        apt = {"env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, "capture_output": True, "check": False}
        subprocess.run(["apt-get", "update", "-qq"], **apt)
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages], **apt)


def main() -> int:
    headers = Path(sysconfig.get_path("include"))
    if needs := missing(os.environ, headers):
        install(list(needs))
    needs = missing(os.environ, headers)
    for package, what in needs.items():
        print(f"setup: {what} is needed and not there (on Debian: apt-get install {package})", file=sys.stderr)
    return 1 if needs else 0


if __name__ == "__main__":
    sys.exit(main())
