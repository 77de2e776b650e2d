"""Compiles kernels/_native with CMake and Ninja: `python tools/build_native.py [native | sanitize | emulate]`.

Each variant has its build folder below build/, where only what changed is compiled again.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# CMake options by variant. Only the first one is linked into kernels/; the others stay in their build folders.
VARIANTS = {
    "native": {"CMAKE_BUILD_TYPE": "Release", "QUIRE_MODULE_DIR": str(ROOT / "kernels")},
    "sanitize": {"CMAKE_BUILD_TYPE": "Debug", "QUIRE_SANITIZE": "address,undefined"},
    "races": {"CMAKE_BUILD_TYPE": "Debug", "QUIRE_SANITIZE": "thread"},
    "emulate": {"CMAKE_BUILD_TYPE": "Release", "QUIRE_EMULATE_AVX512": "ON"},
}


def build_folder(variant: str) -> Path:
    """A folder per variant and Python version, for the module belongs to one version."""
    return ROOT / "build" / f"{variant}-{sys.implementation.cache_tag}"


def program(name: str) -> str:
    """A build tool: the one beside this interpreter, else the one on the path."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if not found:
        raise FileNotFoundError(f"{name} is not installed")
    return found


def build(variant: str = "native") -> None:
    """Configures and compiles what is out of date. Raises CalledProcessError where that fails."""
    folder = build_folder(variant)
    folder.mkdir(parents=True, exist_ok=True)
    options = {
        **VARIANTS[variant],
        # Stated on each call: an earlier one may have had tools that are gone.
        "CMAKE_MAKE_PROGRAM": program("ninja"),
        "Python_EXECUTABLE": sys.executable,
    }
    cmake = program("cmake")
    defined = [f"-D{key}={value}" for key, value in options.items()]
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two builds in one folder would spoil each other
        try:
            subprocess.run(
                [cmake, "-GNinja", f"-S{ROOT}", f"-B{folder}", *defined], check=True, stdout=subprocess.DEVNULL
            )
        except subprocess.CalledProcessError:
            (folder / "CMakeCache.txt").unlink(missing_ok=True)  # else the next try has the same compiler
            raise
        subprocess.run([cmake, "--build", folder, "--", "--quiet"], check=True)


if __name__ == "__main__":
    try:
        build(*sys.argv[1:])
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
