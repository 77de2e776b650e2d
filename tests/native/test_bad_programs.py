"""Programs, weights, sizes and matrices that do not fit are refused when a model is made of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels import _native
from tests.native.packed_models import SETS, aligned

REFUSED = (ValueError, TypeError)

GOOD = {
    "vocab_size": 70, "hidden_size": 40, "head_count": 4, "kv_head_count": 2, "head_size": 32, "intermediate_size": 64,
    "context_length": 64, "norm_epsilon": 1e-5, "attention_scale": 0.2, "rotary_frequencies": np.ones(16),
}  # fmt: skip
F32, AT = _native.FORMATS["f32"], 0


def matrix(rows: int, k: int, format_: int = F32, offset: int = AT) -> tuple[int, int, int, int]:
    return (format_, rows, k, offset)


def build(sizes: dict[str, Any] | None = None, **parts: Any) -> _native.Program:
    """A program of one layer; `parts` replaces arguments, or calls, of its operations."""
    program = _native.Program(**(GOOD | (sizes or {})))
    calls = {
        "embed": (matrix(96, 64),),
        "qkv": (0, matrix(128, 64), matrix(64, 64), matrix(64, 64), -1),
        "attention": (),
        "attention_output": (matrix(64, 128), -1),
        "gate_up": (0, matrix(128, 64), -1),
        "down": (matrix(64, 64), -1),
        "head": (0, matrix(96, 64)),
    }
    for name in parts.pop("order", calls):
        getattr(program, name)(*parts.get(name, calls[name]))
    return program


def model_of(program: _native.Program, weights: Any = None, instruction_set: str = SETS[0]) -> _native.Model:
    weights = aligned(1 << 17) if weights is None else weights
    return _native.Model(program, weights, _native.ThreadPool(1), instruction_set)


def test_the_program_that_bad_ones_are_made_of_is_good() -> None:
    assert model_of(build()).kv_block_bytes("f32") == 2 * 2 * 32 * 32 * 4


@pytest.mark.parametrize(
    "sizes",
    [
        *({name: value} for name in GOOD if isinstance(GOOD[name], int) for value in (0, -32)),
        *({name: 2**31} for name in GOOD if isinstance(GOOD[name], int)),
        {"head_count": 3},
        {"kv_head_count": 3},
        {"head_size": 20},
        {"intermediate_size": 50},
        {"hidden_size": 65},
        {"vocab_size": 97},
        {"rotary_frequencies": np.ones(15)},
        {"rotary_frequencies": np.ones(16, np.float32)},
        {"rotary_frequencies": [1.0] * 16},
    ],
    ids=str,
)  # fmt: skip
def test_sizes_that_do_not_fit(sizes: dict[str, Any]) -> None:
    with pytest.raises(REFUSED):
        model_of(build(sizes))


ORDER = ["embed", "qkv", "attention", "attention_output", "gate_up", "down", "head"]


@pytest.mark.parametrize(
    "parts",
    [
        {"order": ORDER[:-1]},
        {"order": ORDER[1:]},
        {"order": []},
        {"order": [*ORDER, "head"]},
        {"order": [ORDER[0], *ORDER[2:5], "attention", *ORDER[5:]]},
        {"order": ["embed", "gate_up", "attention", "attention_output", "qkv", "down", "head"]},
        {"qkv": (-1, matrix(128, 64), matrix(64, 64), matrix(64, 64), -1)},
        {"gate_up": (-1, matrix(128, 64), -1)},
        {"head": (-1, matrix(96, 64))},
        {"embed": (matrix(64, 64),)},
        {"embed": (matrix(96, 64, format_=len(_native.FORMATS)),)},
        {"embed": (matrix(96, 64, format_=-1),)},
        {"embed": (matrix(96, 64, offset=-64),)},
        {"embed": (matrix(96, 64, offset=32),)},
        {"embed": (matrix(96, 64, offset=1 << 17),)},
        {"embed": (matrix(96, 64, offset=2**62),)},
        {"embed": (matrix(0, 0),)},
        {"embed": (matrix(-96, 64),)},
        {"embed": ((F32, 96, 64),)},
        {"down": (matrix(64, 64, format_=_native.FORMATS["q4g128"]), -1)},
        {"down": (matrix(64, 64, format_=_native.FORMATS["q6k"]), -1)},
        {"down": (matrix(64, 96), -1)},
        {"down": (matrix(64, 64), 32)},
        {"down": (matrix(64, 64), (1 << 17) - 192)},
        {"head": ((1 << 17) - 192, matrix(96, 64))},
        {"qkv": (0, matrix(128, 64), matrix(64, 64), matrix(64, 64), -1, 32)},
        {"attention_output": (matrix(64, 128), -1, (1 << 17) - 448)},
        {"gate_up": (0, matrix(128, 64), -1, 1 << 17)},
        {"down": (matrix(64, 64), -1, 2**62)},
    ],
    ids=str,
)  # fmt: skip
def test_programs_that_do_not_fit(parts: dict[str, Any]) -> None:
    with pytest.raises(REFUSED):
        model_of(build(**parts))


@pytest.mark.parametrize("bad", [-2, 64, 2**31 - 1, -(2**31)])
def test_orders_name_columns_that_are_there(bad: int) -> None:
    program = build(down=(matrix(64, 64), -1, 1024))
    weights = aligned(1 << 17)
    order = weights[1024 : 1024 + 64 * 4].view(np.int32)
    order[:] = -1
    order[5] = 63
    model_of(program, weights)
    order[63] = bad
    with pytest.raises(ValueError, match="columns that are not there"):
        model_of(program, weights)


def test_weights_and_instruction_sets() -> None:
    with pytest.raises(ValueError, match="aligned"):
        model_of(build(), aligned((1 << 17) + 64)[32:])
    with pytest.raises(ValueError, match="outside"):
        model_of(build(), aligned(64))
    with pytest.raises(REFUSED):
        model_of(build(), aligned(1 << 17).view(np.float32))
    with pytest.raises(ValueError, match=r"avx1024 .* portable"):
        model_of(build(), instruction_set="avx1024")


@pytest.mark.parametrize(
    "changed",
    [
        {"rows": 31},
        {"rows": -32},
        {"rows": 64},
        {"chunk": 0},
        {"chunk": -1},
        {"format": 10},
        {"format": -1},
        {"instruction_set": "avx1024"},
        {"values": np.zeros((0, 64), np.float32)},
        {"values": np.zeros((2, 33), np.float32)},
        {"values": np.zeros((2, 0), np.float32)},
        {"values": np.zeros((2, 64))},
        {"packed": np.zeros(8191, np.uint8)},
        {"packed": np.zeros(0, np.uint8)},
    ],
    ids=str,
)
def test_a_matmul_that_does_not_fit(changed: dict[str, Any]) -> None:
    good: dict[str, Any] = {
        "values": np.ones((2, 64), np.float32),
        "packed": np.zeros(8192, np.uint8),
        "format": F32,
        "rows": 32,
        "instruction_set": SETS[0],
        "chunk": 2,
    }
    assert _native.matmul(**good).shape == (2, 32)
    with pytest.raises(REFUSED):
        _native.matmul(**(good | changed))
