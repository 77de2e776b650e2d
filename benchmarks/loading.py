"""How long a 4-bit checkpoint takes to load, beyond reading its files from the disk.

    python -m benchmarks.loading [--format gptq|awq|act-order] [--work DIR] [--rounds 3]

A checkpoint of 1B shape with random numbers is made in --work, unless it is there. Then its files are read, and its
weights packed as an executor's first start does, in turn; the system's file cache is emptied of them before each.
Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from services.executor.backends.cpu.packed_weights import own_memory
from services.executor.backends.cpu.packing import pack
from services.executor.backends.cpu.packing_plan import plan_for
from services.executor.models.checkpoint import open_checkpoint
from services.executor.models.spec import ModelSpec
from services.executor.models.weights import Checkpoint, expected_shapes
from services.executor.quant import awq, gptq
from services.executor.quant.matrix import GroupedMatrix
from services.executor.quant.parts import Part
from services.executor.quantize.hf_files import config_of
from services.executor.quantize.hf_names import module_name, plain_name
from services.executor.quantize.layer import matrix_names
from services.executor.quantize.safetensors_out import write_safetensors

BAR = 0.5
"""Seconds per GB beyond reading."""
GROUP = 128
SPEC = ModelSpec(
    architecture="llama", vocab_size=32000, hidden_size=2048, intermediate_size=8192, layer_count=16, head_count=32,
    kv_head_count=8, head_size=64, context_length=8192, rope_theta=5e5, rope_scaling=None, norm_epsilon=1e-5,
    tied_embeddings=True, attention_bias=False, output_bias=False, mlp_bias=False, bos_token_id=1, eos_token_ids=(2,),
)  # fmt: skip


def make_checkpoint(folder: Path, kind: str) -> None:
    """Random codes, of the format's own making; a matrix is made once for each shape."""
    random = np.random.default_rng(0)
    shapes = expected_shapes(SPEC)
    made: dict[tuple[int, ...], Mapping[str, Part]] = {}
    tensors: dict[str, Part] = {}
    matrices = set(matrix_names(SPEC))
    for name, shape in shapes.items():
        if name in matrices:
            parts = made.get(shape) or made.setdefault(shape, _quantized(shape, kind, random))
            tensors |= {f"{module_name(name)}.{part}": held for part, held in parts.items()}
        else:
            tensors[plain_name(name)] = Part.of("BF16", random.integers(0x3C00, 0x3D00, shape, np.uint16))
    label = (
        awq.label(GROUP)
        if kind == "awq"
        else gptq.label(4, GROUP, is_symmetric=True, is_ordered=kind == "act-order", zero_format="gptq")
    )
    folder.mkdir(parents=True)
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config_of(SPEC) | {"quantization_config": label}))


def _quantized(shape: tuple[int, ...], kind: str, random: np.random.Generator) -> Mapping[str, Part]:
    rows, columns = shape
    scales = random.uniform(0.001, 0.002, (rows, columns // GROUP)).astype(np.float16).astype(np.float32)
    zeros = np.full(scales.shape, 8, np.int16)
    if kind == "awq":
        zeros = random.integers(0, 16, scales.shape).astype(np.int16)
    index = random.permutation(np.arange(columns, dtype=np.int32) // GROUP) if kind == "act-order" else None
    matrix = GroupedMatrix(4, random.integers(0, 16, (rows, columns), np.uint8), scales, zeros, GROUP, index)
    return awq.pack(matrix) if kind == "awq" else gptq.pack(matrix, "gptq")


def read(checkpoint: Checkpoint) -> None:
    """All bytes of the files, once."""
    buffer = bytearray(1 << 22)
    for path in checkpoint.files():
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def load(folder: Path, threads: int) -> None:
    """All weights, packed into memory."""
    checkpoint = open_checkpoint(folder)
    plan = plan_for(checkpoint, "auto")
    pack(checkpoint, plan, own_memory(plan.size), threads)


def rounds(folder: Path, count: int, threads: int) -> Iterator[dict[str, float]]:
    """Seconds of each, each from a cold file cache; `load` takes the checkpoint's opening in."""
    for _ in range(count):
        checkpoint = open_checkpoint(folder)
        size = sum(path.stat().st_size for path in checkpoint.files()) / 1e9
        reading = _timed(folder, partial(read, checkpoint))
        loading = _timed(folder, partial(load, folder, threads))
        beyond = (loading - reading) / size
        yield {"gb": size, "read_s": reading, "load_s": loading, "beyond_s_per_gb": beyond}


def _timed(folder: Path, action: Callable[[], object]) -> float:
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=("gptq", "awq", "act-order"), default="gptq")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "quire-loading")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    folder: Path = options.work / options.format
    if not folder.exists():
        make_checkpoint(folder, options.format)
    found: list[dict[str, Any]] = []
    for one in rounds(folder, options.rounds, options.threads):
        found.append(one)
        print({key: round(value, 3) for key, value in one.items()}, file=sys.stderr)
    beyond = statistics.median(one["beyond_s_per_gb"] for one in found)
    print(json.dumps({"format": options.format, "bar": BAR, "beyond_s_per_gb": round(beyond, 3), "rounds": found}))
    return 0 if beyond <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
