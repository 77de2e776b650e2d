"""Packed weights of quantized checkpoints: the very codes and scales that these hold, in whatever order."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import QuireError
from services.executor.backends.cpu.packed_weights import PackedWeights
from services.executor.models.spec import ModelSpec
from services.executor.models.weights import QuantizedTensor
from services.executor.quant.matrix import GroupedMatrix
from tests.unit.executor.packing_fakes import (
    ODD_SPEC,
    SPEC,
    WIDE_SPEC,
    MadeCheckpoint,
    expected_matrix,
    make_checkpoint,
    matrix_names,
    packed,
    read_matrix,
)
from tests.unit.executor.quantized_fakes import Fp8, Grouped, Make, quantize_layers, quantized

PARTS = ("q", "k", "v", "o", "gate_up", "down")
DEEP_SPEC = replace(WIDE_SPEC, head_count=2, kv_head_count=1, head_size=128)


def made(spec: ModelSpec, make: Make, **others: Make) -> MadeCheckpoint:
    checkpoint = make_checkpoint(spec, "BF16")
    quantize_layers(checkpoint, make, **others)
    return checkpoint


def in_order_of_inputs(weights: PackedWeights, name: str) -> tuple[str, np.ndarray]:
    """Format and values of a packed matrix, its columns where its inputs are."""
    format_, values = read_matrix(weights, name)
    prefix, _, part = name.rpartition(".")
    offset = weights.vector(f"{prefix}.{'qkv' if part in 'qkv' else part}_order")
    if offset < 0:
        return format_, values
    order = weights.buffer[offset : offset + values.shape[1] * 4].view(np.int32)
    assert not values[:, order < 0].any()
    out = np.zeros_like(values)
    out[:, order[order >= 0]] = values[:, order >= 0]
    return format_, out


def assert_exact(checkpoint: MadeCheckpoint) -> list[str]:
    """Every matrix of a layer has the checkpoint's values; their formats."""
    weights = packed(checkpoint, threads=2)
    formats = []
    for part in PARTS:
        format_, found = in_order_of_inputs(weights, f"layers.0.{part}")
        expected = expected_matrix(checkpoint, f"layers.0.{part}")
        # fp32 rounds d * (q - z) once, whoever multiplies.
        np.testing.assert_array_equal(found, expected, err_msg=part)
        formats.append(format_)
    assert weights.conversions == ()
    return formats


@pytest.mark.parametrize("order", [None, 1], ids=["neighbours", "act-order"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero points"])
@pytest.mark.parametrize(("bits", "size"), [(2, 32), (3, 64), (4, 32), (4, 64), (4, 128), (4, 256)])
def test_few_bits_are_exact(bits: int, size: int, symmetric: bool, order: int | None) -> None:
    found = assert_exact(made(DEEP_SPEC, Grouped(bits, size, symmetric, order)))
    kind = "q4g" if symmetric or bits < 4 else "q4zg"
    assert set(found) == {f"{kind}{min(size, 128)}"}


@pytest.mark.parametrize("order", [None, 1], ids=["neighbours", "act-order"])
def test_short_last_groups_are_exact(order: int | None) -> None:
    """96 and 160 columns in groups of 128; o has 128."""
    found = assert_exact(made(SPEC, Grouped(4, 128, order=order)))
    assert dict(zip(PARTS, found, strict=True)) == dict.fromkeys(PARTS, "q4zg32") | {"o": "q4zg128"}


def test_zero_points_beyond_all_codes_are_exact() -> None:
    """Zero points that are stored one lower reach 16."""
    checkpoint = made(DEEP_SPEC, Grouped(4, 64))
    for part in ("q", "k", "v", "o", "gate", "up", "down"):
        tensor = checkpoint.tensor(f"layers.0.{part}")
        matrix = tensor.read(0, tensor.shape[0])
        matrix.zeros[::3] = 16
        checkpoint.tensors[tensor.name] = quantized(tensor.name, matrix)
    assert set(assert_exact(checkpoint)) == {"q4zg64"}


def test_a_scale_a_row_is_repeated() -> None:
    assert set(assert_exact(made(DEEP_SPEC, Grouped(4, 1 << 20)))) == {"q4zg128"}
    assert set(assert_exact(made(DEEP_SPEC, Grouped(8, 1 << 20, symmetric=True)))) == {"q8c"}
    assert set(assert_exact(made(SPEC, Grouped(8, 1 << 20, symmetric=True)))) == {"q8c"}


@pytest.mark.parametrize("order", [None, 1], ids=["neighbours", "act-order"])
def test_eight_bits_in_groups_are_exact(order: int | None) -> None:
    assert set(assert_exact(made(DEEP_SPEC, Grouped(8, 128, symmetric=True, order=order)))) == {"q8"}


@pytest.mark.parametrize("block", [(128, 128), (None, None), (1, None), (64, 256)], ids=str)
def test_fp8_is_exact(block: tuple[int | None, int | None]) -> None:
    assert set(assert_exact(made(DEEP_SPEC, Fp8(block)))) == {"f8"}
    if block != (64, 256):
        assert set(assert_exact(made(SPEC, Fp8(block)))) == {"f8"}


def test_padding_between_heads_is_sorted_away() -> None:
    """Heads of 48 are padded to 64; groups of 64 reach from one to the next."""
    spec = replace(DEEP_SPEC, head_size=48, head_count=8)
    checkpoint = made(spec, Grouped(4, 64))
    assert assert_exact(checkpoint) == ["q4zg64"] * 6
    weights = packed(checkpoint)
    assert [weights.vector(f"layers.0.{part}_order") >= 0 for part in ("qkv", "o", "down")] == [False, True, False]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 4),
    st.sampled_from([32, 64, 96, 128, 160, 256]),
    st.booleans(),
    st.none() | st.integers(0, 5),
    st.sampled_from([(32, 96, 4, 2, 20), (96, 64, 3, 1, 32), (160, 100, 4, 4, 48), (42, 300, 2, 1, 36)]),
)
def test_any_shape_is_exact(
    bits: int, size: int, symmetric: bool, order: int | None, sizes: tuple[int, int, int, int, int]
) -> None:
    hidden, inner, heads, kv_heads, head_size = sizes
    spec = replace(SPEC, layer_count=1, hidden_size=hidden, intermediate_size=inner, head_count=heads,
                   kv_head_count=kv_heads, head_size=head_size)  # fmt: skip
    assert_exact(made(spec, Grouped(bits, size, symmetric, order)))


def test_matrices_of_the_same_inputs_share_an_order() -> None:
    """Groups of 128 that hold those of 64 stay whole in the order of both."""
    coarse = Grouped(4, 128, order=3)
    fine = Grouped(3, 64, order=3)
    assert assert_exact(made(DEEP_SPEC, coarse, q=fine))[:3] == ["q4g64", "q4zg128", "q4zg128"]


def test_matrices_without_groups_take_any_order() -> None:
    checkpoint = made(DEEP_SPEC, Grouped(4, 64, order=3), k=Grouped(8, 1 << 20, symmetric=True), v=Fp8((1, None)))
    plain = make_checkpoint(DEEP_SPEC, "BF16").tensor("layers.0.q")
    checkpoint.tensors["layers.0.q"] = plain
    # A single order is only taken for what needs one.
    assert assert_exact(checkpoint)[:3] == ["bf16", "q8c", "f8"]
    checkpoint.tensors["layers.0.k"] = quantized(
        "layers.0.k", Grouped(4, 64, order=4)((128, 256), np.random.default_rng(0))
    )
    assert assert_exact(checkpoint)[:3] == ["bf16", "q4zg64", "f8"]
    assert packed(checkpoint).vector("layers.0.qkv_order") >= 0


def test_orders_that_contradict_each_other_cost_one_its_codes() -> None:
    checkpoint = made(DEEP_SPEC, Grouped(4, 64, order=1), k=Grouped(4, 64, order=2), up=Grouped(4, 64, order=2))
    weights = packed(checkpoint)
    assert weights.conversions == ("uint4 in groups of 64, any order as q8 x 2",)
    for part in PARTS:
        format_, found = in_order_of_inputs(weights, f"layers.0.{part}")
        expected = expected_matrix(checkpoint, f"layers.0.{part}")
        if format_ == "q8":
            assert np.abs(found - expected).max() <= np.abs(expected).max() / 254 * 1.01
        else:
            np.testing.assert_array_equal(found, expected)
    assert [read_matrix(weights, f"layers.0.{part}")[0] for part in PARTS] == [
        "q4zg64", "q8", "q4zg64", "q4zg64", "q8", "q4zg64",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "conversion"),
    [
        (Grouped(4, 48), "uint4 in groups of 48 as q8"),
        (Grouped(8, 64), "uint8 in groups of 64 as q8"),
        (Grouped(3, 16, symmetric=True), "int3 in groups of 16 as q8"),
        (Fp8((32, 32)), "e4m3 in blocks of 32x32 as q8"),
    ],
)
def test_what_no_format_holds_becomes_the_nearest_q8(make: Make, conversion: str) -> None:
    checkpoint = made(DEEP_SPEC, make)
    weights = packed(checkpoint)
    assert weights.conversions == (f"{conversion} x 7",)
    for part in PARTS:
        format_, found = read_matrix(weights, f"layers.0.{part}")
        expected = expected_matrix(checkpoint, f"layers.0.{part}")
        assert format_ == "q8"
        step = np.abs(expected.reshape(len(expected), -1, 32)).max(axis=2, keepdims=True) / 127 * (1 + 2**-10)
        assert (np.abs((found - expected).reshape(len(found), -1, 32)) <= step * 0.51 + 2**-24).all()


def test_two_formats_in_a_matrix_keep_the_codes_of_both() -> None:
    formats = assert_exact(made(DEEP_SPEC, Grouped(4, 128), gate=Grouped(4, 32, symmetric=True)))
    assert formats[4] == "q4zg32"
    formats = assert_exact(made(DEEP_SPEC, Grouped(4, 128), up=Grouped(8, 64, symmetric=True)))
    assert formats[4] == "q8"


def test_a_wanted_format_is_made_of_the_values() -> None:
    checkpoint = made(ODD_SPEC, Grouped(4, 32, order=1))
    weights = packed(checkpoint, "f32")
    for name in matrix_names(ODD_SPEC)[2:]:
        format_, found = read_matrix(weights, name)
        assert format_ == "f32"
        np.testing.assert_array_equal(found, expected_matrix(checkpoint, name))
    assert weights.vector("layers.0.qkv_order") == -1


def test_quantized_embeddings_and_heads() -> None:
    """Rows of an embedding are looked up: its columns stay where they are."""
    ordered = Grouped(4, 64, order=2)
    checkpoint = made(DEEP_SPEC, ordered, embedding=Grouped(4, 64), head=ordered)
    weights = packed(checkpoint)
    assert weights.conversions == ()
    assert weights.vector("embedding_order") == -1
    assert weights.vector("head_order") >= 0
    np.testing.assert_array_equal(read_matrix(weights, "embedding")[1], expected_matrix(checkpoint, "embedding"))


def test_scales_beyond_fp16_are_rounded_aloud(caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = made(DEEP_SPEC, Grouped(4, 64))
    matrix = Grouped(4, 64)((256, 256), np.random.default_rng(0))
    matrix.scales[3, 1] = 0.1
    checkpoint.tensors["layers.0.up"] = quantized("layers.0.up", matrix)
    with caplog.at_level(logging.WARNING, "quire.executor"):
        packed(checkpoint)
    assert [record.count for record in caplog.records] == [1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e6])
@pytest.mark.parametrize("name", ["layers.0.q", "layers.0.down"])
def test_bad_scales_are_found(name: str, bad: float) -> None:
    checkpoint = made(DEEP_SPEC, Grouped(4, 64, order=1))
    matrix = checkpoint.tensor(name).read(0, checkpoint.shapes()[name][0])
    assert isinstance(matrix, GroupedMatrix)
    matrix.scales[-1, -1] = bad
    checkpoint.tensors[name] = quantized(name, matrix)
    with pytest.raises(QuireError, match=rf"tensor {name} holds NaN or infinity"):
        packed(checkpoint)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_fp8_nan_is_found(code: int) -> None:
    checkpoint = made(DEEP_SPEC, Fp8())
    matrix = Fp8()((256, 256), np.random.default_rng(0))
    matrix.codes[-1, -1] = code
    checkpoint.tensors["layers.0.up"] = quantized("layers.0.up", matrix)
    with pytest.raises(QuireError, match=r"tensor layers\.0\.up holds NaN"):
        packed(checkpoint)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([32, 64, 128, 256]),
    st.booleans(),
    st.none() | st.integers(0, 5),
    st.sampled_from([(64, 96, 4, 2, 32), (128, 160, 2, 2, 64), (256, 512, 3, 1, 64), (160, 8, 5, 5, 24)]),
    st.integers(1, 3),
)
def test_nibbles_that_stay_packed_become_the_same_bytes(
    size: int, is_symmetric: bool, order: int | None, sizes: tuple[int, int, int, int], threads: int
) -> None:
    hidden, inner, heads, kv_heads, head_size = sizes
    spec = replace(SPEC, layer_count=1, hidden_size=hidden, intermediate_size=inner, head_count=heads,
                   kv_head_count=kv_heads, head_size=head_size)  # fmt: skip
    checkpoint = made(spec, Grouped(4, size, is_symmetric, order))
    found = packed(checkpoint, threads=threads).buffer.copy()
    for name, tensor in checkpoint.tensors.items():
        if isinstance(tensor, QuantizedTensor):
            checkpoint.tensors[name] = replace(tensor, read_nibbles=None)
    np.testing.assert_array_equal(found, packed(checkpoint).buffer)
