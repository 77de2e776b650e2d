"""Native matmul against the reference, every format on every instruction set of this machine."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from kernels import _native
from kernels.matmul.reference import matmul, quantize_activations, unpack
from services.executor.backends.cpu.formats import FORMATS, group_size, has_minimum, has_zero, panel_bytes
from services.executor.backends.cpu.panels import EncodedRows, write_rows
from services.executor.backends.cpu.quantize import encode, nibble_words, round_to_bf16, six_bit_words
from services.executor.backends.cpu.repack import REPACKERS
from tests.native import budgets
from tests.native.packed_models import FUSED, SETS
from tests.unit.executor.packing_fakes import random_blocks

Float32 = NDArray[np.float32]

TOKENS = (1, 2, 3, 4, 5, 6, 7, 11, 47, 49, 97)
"""Every register tile and its rests, and what does not fit one pass of the caller's."""
BF16_ACTIVATIONS = "avx512_vnni"
"""The set that rounds activations to bf16 where weights are bf16."""


def pack(format_: str, values: Float32) -> NDArray[np.uint8]:
    return write(format_, encode(format_, values), values.shape[1])


def write(format_: str, rows: EncodedRows, k: int) -> NDArray[np.uint8]:
    panels = np.full((len(rows.words) // 32, panel_bytes(format_, k)), 0xA5, np.uint8)
    write_rows(format_, panels, slice(0, 32), rows)
    return panels.reshape(-1)


def multiply(
    x: Float32, packed: NDArray[np.uint8], format_: str, rows: int, instruction_set: str, chunk: int
) -> Float32:
    found: Float32 = _native.matmul(x, packed, FORMATS[format_], rows, instruction_set, chunk)
    return found


def expected(format_: str, packed: NDArray[np.uint8], rows: int, x: Float32, instruction_set: str) -> Float32:
    if (format_, instruction_set) == ("bf16", BF16_ACTIVATIONS):
        x = (round_to_bf16(x).astype(np.uint32) << 16).view(np.float32)
    return matmul(format_, packed, rows, x)


def widths(format_: str) -> list[int]:
    """The narrowest matrix, and an odd number of groups; of f8 blocks that end within the matrix."""
    if format_ == "f8":
        return [32, 288]
    return [max(32, group_size(format_)) * groups for groups in (1, 3)]


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("format_", FORMATS)
def test_equals_the_reference(format_: str, instruction_set: str) -> None:
    rng = np.random.default_rng(0)
    for k in widths(format_):
        packed = pack(format_, rng.normal(0, 1, (96, k)).astype(np.float32))
        sizes = np.abs(unpack(format_, packed, 96, k))
        for tokens in TOKENS:
            # Rows of unlike sizes, so that a scale that goes astray shows.
            x = (rng.normal(0, 1, (tokens, k)) * rng.uniform(0.1, 100, (tokens, 1))).astype(np.float32)
            found = multiply(x, packed, format_, 96, instruction_set, chunk=48)
            error = np.abs(found - expected(format_, packed, 96, x, instruction_set)) / (np.abs(x) @ sizes.T)
            assert error.max() < budgets.of(budgets.MATMUL, format_), (k, tokens)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize(("stored", "format_", "steps"), [("Q4_K", "q4k", 127), ("Q6_K", "q6k", 32767)])
def test_k_quants_are_what_gguf_reads(stored: str, format_: str, steps: int, instruction_set: str) -> None:
    """ggml's blocks with any bits, scales of either sign: nothing but activations is rounded."""
    rng = np.random.default_rng(7)
    for rows, k in ((32, 256), (96, 1280)):
        blocks = random_blocks("w", (rows, k), stored, rng)
        weights = gguf.quants.dequantize(blocks.data, gguf.GGMLQuantizationType[stored]).astype(np.float64)
        packed = write(format_, REPACKERS[stored, format_](blocks.data), k)
        x = rng.normal(0, 1, (5, k)).astype(np.float32)
        quants, scales = quantize_activations(x, steps)
        exact = (np.repeat(scales, 32, axis=1).astype(np.float64) * quants) @ weights.T
        error = np.abs(multiply(x, packed, format_, rows, instruction_set, 5) - exact) / (np.abs(x) @ np.abs(weights).T)
        assert error.max() < budgets.of(budgets.MATMUL, format_), (rows, k)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("format_", FORMATS)
def test_a_token_has_the_same_bits_in_any_chunk(format_: str, instruction_set: str) -> None:
    rng = np.random.default_rng(1)
    k = widths(format_)[1]
    packed = pack(format_, rng.normal(0, 1, (64, k)).astype(np.float32))
    x = rng.normal(0, 1, (53, k)).astype(np.float32)
    whole = multiply(x, packed, format_, 64, instruction_set, chunk=53)
    for chunk in (1, 2, 3, 4, 5, 6, 7, 11, 48):
        assert np.array_equal(multiply(x, packed, format_, 64, instruction_set, chunk), whole), chunk
    assert np.array_equal(multiply(x[50:51], packed, format_, 64, instruction_set, 1), whole[50:51])


@pytest.mark.parametrize("format_", FORMATS)
def test_fused_sets_agree_bit_for_bit(format_: str) -> None:
    rng = np.random.default_rng(2)
    k = widths(format_)[1]
    packed = pack(format_, rng.normal(0, 1, (32, k)).astype(np.float32))
    x = rng.normal(0, 1, (9, k)).astype(np.float32)
    alike = [name for name in FUSED if (format_, name) != ("bf16", BF16_ACTIVATIONS)]
    found = [multiply(x, packed, format_, 32, name, 9) for name in alike]
    assert all(np.array_equal(one, found[0]) for one in found)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("format_", FORMATS)
def test_largest_values_are_exact(format_: str, instruction_set: str) -> None:
    """No partial sum of integers saturates: weights and activations at their ends, all signs alike and mixed."""
    k = widths(format_)[1]
    size = group_size(format_) if group_size(format_) > 1 else k
    rng = np.random.default_rng(3)
    signs = np.stack([np.ones(k), -np.ones(k), *rng.choice([-1.0, 1.0], (30, k))])
    scales = minima = None
    match format_:
        case "f32" | "bf16":
            rows = encode(format_, (127 * signs).astype(np.float32))
        case "f8":
            codes = np.where(signs > 0, 0x7E, 0xFE).astype(np.uint8)  # 448
            rows = EncodedRows(codes[:, None], np.ones((32, -(-k // 128)), np.float32))
        case "q8" | "q8c":
            quants = np.where(signs > 0, 127, -128).astype(np.int8).reshape(32, -1, 32 if format_ == "q8" else k)
            scales = np.ones(quants.shape[:2], np.float16 if format_ == "q8" else np.float32)
            rows = EncodedRows(quants.view(np.uint32), scales)
        case "q4k":
            quants = np.where(signs > 0, 15, 0).astype(np.uint8).reshape(32, -1, 256)
            ones, steps = np.ones(quants.shape[:2], np.float16), np.ones((*quants.shape[:2], 16), np.uint8)
            rows = EncodedRows(nibble_words(quants), ones, np.float16(-8) * ones, steps)
        case "q6k":
            quants = np.where(signs > 0, 31, -32).astype(np.int8).reshape(32, -1, 256)
            steps = rng.choice([-128, 127], (*quants.shape[:2], 16)).astype(np.int8)
            rows = EncodedRows(six_bit_words(quants.view(np.uint8)), np.ones(quants.shape[:2], np.float16), steps=steps)
        case _:
            quants = np.where(signs > 0, 15, 0).astype(np.uint8).reshape(32, -1, 2, 16)
            bytes_ = quants[:, :, 0] | quants[:, :, 1] << 4
            scales = np.ones((32, k // size), np.float16)
            minima = np.full((32, k // size), -8, np.float16) if has_minimum(format_) else None
            zeros = rng.integers(-128, 128, (32, k // size)).astype(np.int8) if has_zero(format_) else None
            rows = EncodedRows(bytes_.reshape(32, k // size, -1).view(np.uint32), scales, minima, zeros=zeros)
    packed = write(format_, rows, k)
    fine = format_ in ("q8", "q6k")
    most = 32767 if fine else 127
    x = (most * np.concatenate((signs[:5], [np.resize([1, -1, 0], k)]))).astype(np.float32)
    weights = unpack(format_, packed, 32, k).astype(np.int64)
    exact = x.astype(np.int64) @ weights.T
    found = multiply(x, packed, format_, 32, instruction_set, 6)
    if fine:  # such sums take more than the 24 bits of a float
        assert (np.abs(found - exact) <= budgets.MATMUL[format_] * (np.abs(x) @ np.abs(weights).T)).all()
    else:
        assert np.array_equal(found, exact)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_and_stays_in_its_row(format_: str, instruction_set: str, bad: float) -> None:
    rng = np.random.default_rng(4)
    k = widths(format_)[1]
    packed = pack(format_, rng.normal(0, 1, (32, k)).astype(np.float32))
    x = rng.normal(0, 1, (7, k)).astype(np.float32)
    clean = multiply(x, packed, format_, 32, instruction_set, 7)
    for at in (0, 5, 31, k - 1):
        x[3, at], before = bad, x[3, at]
        found = multiply(x, packed, format_, 32, instruction_set, 7)
        x[3, at] = before
        assert not np.isfinite(found[3]).any(), at
        assert np.array_equal(np.delete(found, 3, 0), np.delete(clean, 3, 0)), at


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("format_", FORMATS)
def test_tiny_and_zero_activations(format_: str, instruction_set: str) -> None:
    """Values whose reciprocal overflows lose their bits, never more than that."""
    rng = np.random.default_rng(5)
    k = widths(format_)[1]
    packed = pack(format_, rng.normal(0, 1, (32, k)).astype(np.float32))
    x = rng.normal(0, 1, (6, k)).astype(np.float32) * np.float32([[0], [1e-45], [1e-40], [1e-38], [3e-37], [1e-36]])
    found = multiply(x, packed, format_, 32, instruction_set, 6)
    assert np.isfinite(found).all()
    assert not found[0].any()
    assert np.abs(found).max() < 1e-33
