"""Compiles every Triton kernel for GPUs that are not there; prints what is wrong, exits with 1 if anything is.

The project's own launchers run on small CPU tensors, and a driver that only names a target takes the launches: so what
is compiled is what a GPU would be asked to run. `--targets 80,90` names capabilities, `--only NAME` a kernel's folder.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.pop("TRITON_INTERPRET", None)

import triton  # noqa: E402 (reads the environment)
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes that a program may have, by capability."""

CASES = Path(__file__).with_name("kernel_cases")


class Target:
    """A driver of a GPU that nobody has: it answers what compiling asks, and launches nothing."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # compiled kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


class Recorder:
    """Takes the place of a launch: compiles, and notes what does not fit the target."""

    def __init__(self) -> None:
        self.count = 0
        self.seen: set[int] = set()
        self.problems: list[str] = []

    def run(self, compile_: Any, kernel: JITFunction, *args: Any, **options: Any) -> Any:
        options["warmup"] = True
        compiled = compile_(kernel, *args, **options)
        capability = triton.runtime.driver.active.get_current_target().arch
        if id(compiled) not in self.seen:
            self.seen.add(id(compiled))
            self.count += 1
            if (shared := compiled.metadata.shared) > SHARED_MEMORY[capability]:
                self.problems.append(f"{compiled.metadata.name}: {shared} bytes of shared memory")
        return compiled


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", default="80,90", help="capabilities, joined by commas")
    parser.add_argument("--only", help="a module of tools/kernel_cases")
    parser.add_argument("--quick", action="store_true", help="one variant of each kernel")
    options = parser.parse_args(argv)
    recorder = Recorder()
    plain = JITFunction.run
    JITFunction.run = functools.partialmethod(lambda kernel, *a, **o: recorder.run(plain, kernel, *a, **o))
    names = [options.only] if options.only else sorted(path.stem for path in CASES.glob("[a-z]*.py"))
    failed = False
    for capability in map(int, options.targets.split(",")):
        triton.runtime.driver.set_active(Target(capability))
        for name in names:
            cases = importlib.import_module(f"tools.kernel_cases.{name}").cases()
            for title, call in list(cases.items())[: 1 if options.quick else None]:
                started, before, found = time.monotonic(), recorder.count, len(recorder.problems)
                try:
                    call()
                    wrong = "; ".join(recorder.problems[found:])
                except Exception as error:  # whatever a compiler says
                    wrong = f"{type(error).__name__}: {error}"
                failed |= bool(wrong)
                taken = f"{recorder.count - before} kernels, {time.monotonic() - started:.1f} s"
                print(f"sm_{capability} {name}: {title}: {wrong or 'ok'} ({taken})", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
