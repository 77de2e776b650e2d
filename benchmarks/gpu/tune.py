"""Finds the fastest configurations on the first CUDA device and writes them as its table beside the kernels.

    python -m benchmarks.gpu.tune
    python -m benchmarks.gpu.tune --only multiply_int4 --minutes 2

The table is `kernels/gpu/tables/<card>.json`; entries of kernels that were not tuned stay. Results do not depend on it
but for rounding. `TRITON_INTERPRET=1 ... --dry --out FILE` tries two configurations of each kernel, tiny.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Problem:
    """One entry of a table to be: what is launched, for which shapes it stands, and what may be tried."""

    kernel: str
    shape: Mapping[str, int | list[int]]
    run: Callable[[], object]
    configs: Sequence[Mapping[str, int]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="a kernel, as its table names it")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for all")
    parser.add_argument("--out", type=Path, help="another file than the card's own table")
    parser.add_argument("--dry", action="store_true", help="tiny, on the CPU")
    options = parser.parse_args(argv)
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"
    from benchmarks.gpu import setting as settings
    from benchmarks.gpu.tune_problems import problems
    from kernels.gpu.device import gpu_of
    from kernels.gpu.tuned import TABLES, table_name

    try:
        setting = settings.dry() if options.dry else settings.on_card()
    except RuntimeError as error:
        print(f"tune: {error}", file=sys.stderr)
        return 2
    path = options.out or TABLES / f"{table_name(gpu_of(setting.place).name)}.json"
    ends_at = time.monotonic() + options.minutes * 60
    found: dict[str, list[dict[str, Any]]] = {}
    for problem in problems(setting):
        if options.only not in (None, problem.kernel):
            continue
        if time.monotonic() > ends_at:
            print("tune: the time is over; later shapes keep what they had", file=sys.stderr)
            break
        tried = islice(problem.configs, 2 if options.dry else None)
        best, seconds = fastest(problem, tried, setting.clock.seconds)
        print(f"{problem.kernel} {dict(problem.shape)}: {dict(best)} {seconds * 1e6:.1f} us", flush=True)
        if best:
            found.setdefault(problem.kernel, []).append({"shape": dict(problem.shape), "config": dict(best)})
    write(path, found)
    print(path)
    return 0


def fastest(
    problem: Problem, configs: Iterator[Mapping[str, int]], seconds: Callable[[Callable[[], object]], float]
) -> tuple[Mapping[str, int], float]:
    """The best configuration; empty where none is faster than what holds without a table, or none can be launched."""
    from kernels.gpu.tuned import override

    best: Mapping[str, int] = {}
    with override(problem.kernel, {}):
        least = seconds(problem.run)
    for config in configs:
        try:
            with override(problem.kernel, config):
                taken = seconds(problem.run)
        except Exception as error:  # too much shared memory, a shape that the kernel refuses
            print(f"  {dict(config)}: {type(error).__name__}", flush=True)
            continue
        if taken < least and math.isfinite(taken):
            best, least = config, taken
    return best, least


def write(path: Path, found: Mapping[str, list[dict[str, Any]]]) -> None:
    """Replaces the entries of these kernels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text()) if path.exists() else {}
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(before | dict(found), indent=1) + "\n")
    draft.replace(path)


def combinations(**choices: Sequence[int]) -> list[dict[str, int]]:
    """All of them."""
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


if __name__ == "__main__":
    sys.exit(main())
