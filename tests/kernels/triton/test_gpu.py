"""What all kernels share: tuned configurations, and number formats."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels.gpu.device import INTERPRETER, Gpu, gpu_of
from kernels.gpu.numbers import bf16_away, bf16_towards, e4m3_codes, e4m3_values, round_even
from kernels.gpu.tuned import read_table, table_name, tuned
from services.executor.quant.matrix import fp8_codes, fp8_values


@dataclass(frozen=True)
class Config:
    tile: int = 64
    warps: int = 4


def test_tables_are_looked_up_by_gpu_and_shape(tmp_path: Path) -> None:
    gpu = Gpu("NVIDIA H200 NVL", 90, 132)
    table = {
        "attention": [
            {"shape": {"head_size": 128, "rows": [1, 16]}, "config": {"tile": 32}},
            {"shape": {"rows": [1, 64]}, "config": {"warps": 8}},
        ]
    }
    (tmp_path / f"{table_name(gpu.name)}.json").write_text(json.dumps(table))

    def found(name: str, **shape: int) -> Config:
        return tuned("attention", Gpu(name, 90, 132), Config(), shape, tmp_path)

    assert table_name(gpu.name) == "nvidia_h200_nvl"
    assert found(gpu.name, head_size=128, rows=16) == Config(tile=32)
    assert found(gpu.name, head_size=64, rows=16) == Config(warps=8)
    assert found(gpu.name, head_size=128, rows=65) == Config()
    assert found("NVIDIA A100", head_size=128, rows=1) == Config()
    with pytest.raises(ValueError, match="asks for \\['head_size'\\]"):
        found(gpu.name, rows=1)


@pytest.mark.parametrize("text", ["[]", "{", '{"attention": [{"config": {}}]}', '{"a": [{"shape": {"x": [1]}}]}'])
def test_a_broken_table_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"card\.json"):
        read_table(path)


def test_the_device_is_known(device: torch.device) -> None:
    assert (gpu_of(device) == INTERPRETER) == (device.type == "cpu")


@triton.jit
def formats_kernel(codes, values, away, towards, rounded, x, HAS_FP8: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    found = e4m3_codes(v, HAS_FP8)
    tl.store(codes + i, found)
    tl.store(values + i, e4m3_values((i % 256).to(tl.uint8), HAS_FP8))
    tl.store(away + i, bf16_away(v))
    tl.store(towards + i, bf16_towards(v))
    tl.store(rounded + i, round_even(v))


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # NumPy's, of NaN, under the interpreter
def test_numbers_are_rounded_as_the_cpu_rounds_them(device: torch.device) -> None:
    every = fp8_values()
    between = (every[:126] + every[1:127]) / 2  # ties
    drawn = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    special = np.array([0.0, -0.0, 448, 464, 465, 1e9, -1e9, np.nan, 2**-10, 2**-9, 3 * 2**-10], np.float32)
    numbers = np.concatenate((between, -between, drawn, drawn * 1e-2, drawn * 300, special))
    numbers = np.pad(numbers, (0, 2048 - len(numbers)))
    x = torch.from_numpy(numbers).to(device)
    codes = torch.zeros(2048, dtype=torch.uint8, device=device)
    values = torch.zeros(2048, dtype=torch.float16, device=device)
    away, towards, rounded = (torch.zeros_like(x) for _ in range(3))
    formats_kernel[(1,)](codes, values, away, towards, rounded, x, HAS_FP8=gpu_of(device).has_fp8, N=2048)
    expected, found = fp8_codes(numbers), codes.cpu().numpy()
    is_number = ~np.isnan(numbers)
    assert np.array_equal(found[is_number], expected[is_number])
    assert bool((found[~is_number] & 127 == 127).all())
    assert np.array_equal(values.cpu().numpy()[:256].astype(np.float32), every, equal_nan=True)
    cut = (numbers.view(np.uint32) & 0xFFFF0000).view(np.float32)
    step = ((numbers.view(np.uint32) + np.uint32(0xFFFF)) & 0xFFFF0000).view(np.float32)
    assert np.array_equal(towards.cpu().numpy()[is_number], cut[is_number])
    assert np.array_equal(away.cpu().numpy()[is_number], step[is_number])
    small = is_number & (np.abs(numbers) < 2**22)
    assert np.array_equal(rounded.cpu().numpy()[small], np.rint(numbers[small]))
