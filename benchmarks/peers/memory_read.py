"""Decode at batch 1 against plain reads of as many bytes as a step reads weights, taken in turn in one process.

    python -m benchmarks.peers.memory_read --model smollm2 --threads 2 --pairs 20

The last line is JSON: median shares of the read's speed, apart for slow and fast reads, and the median read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from statistics import fmean, median

FAST_BYTES_PER_SECOND = 40e9
READ_SECONDS = 0.15
PROMPT, OUTPUT = 32, 33


def shares(reads: Sequence[float], steps: Sequence[float], step_bytes: int) -> dict[str, float]:
    """Figures from n + 1 reads (bytes per second) around n runs (steps per second), each step reading `step_bytes`."""
    by_speed: dict[str, list[float]] = {}
    for before, after, rate in zip(reads, reads[1:], steps, strict=False):
        read = fmean((before, after))
        name = "share below 40 GB/s" if read < FAST_BYTES_PER_SECOND else "share above 40 GB/s"
        by_speed.setdefault(name, []).append(rate * step_bytes / read)
    return {"read GB/s": median(reads) / 1e9} | {name: median(found) for name, found in by_speed.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--pairs", type=int, default=20)
    args = parser.parse_args()
    from kernels._native import read_bandwidth
    from services.executor.backends.cpu.backend import CpuBackend
    from services.executor.batch import StepLimits
    from services.executor.bench import measure
    from services.executor.loader import make_loader
    from services.executor.settings import ExecutorSettings

    wanted = {name: getattr(args, name) for name in ("model", "backend", "dtype", "threads")}
    model = make_loader(ExecutorSettings.model_validate(wanted | {"kv_blocks": 8}))("", args.model)
    if not isinstance(model.backend, CpuBackend):
        sys.exit(f"only the cpu backend knows how many bytes a step reads, not {model.backend.name}")
    step_bytes = model.backend.weights.buffer.nbytes
    limits = StepLimits(1, 512)
    measure(model, limits, 1, PROMPT, 4)
    reads, steps = [read_bandwidth(step_bytes, args.threads, READ_SECONDS)], []
    for _ in range(args.pairs):
        steps.append(measure(model, limits, 1, PROMPT, OUTPUT).decode_tok_s)
        reads.append(read_bandwidth(step_bytes, args.threads, READ_SECONDS))
    print(json.dumps(shares(reads, steps, step_bytes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
