"""compressed-tensors: integers packed and plain, FP8, what activations should be, labels that are wrong."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from services.executor.models.weights import Activations
from services.executor.quant.compressed_tensors import CompressedTensorsScheme
from services.executor.quant.compressed_tensors_pack import (
    FP8_INPUTS,
    INT8_INPUTS,
    fp8_weights,
    integer_weights,
    label,
    pack_bytes,
    pack_fp8,
    pack_words,
)
from services.executor.quant.matrix import Fp8Format, Fp8Matrix, GroupedMatrix
from services.executor.quant.parts import Part
from tests.unit.executor.quant.made import WIDTHS, assert_same, fp8, grouped, layer, read, refused, symmetric, values


def settings(matrix: GroupedMatrix) -> dict[str, Any]:
    format_ = matrix.format
    size = -1 if format_.group_size == matrix.shape[1] else format_.group_size
    return integer_weights(format_.bits, size, is_symmetric=format_.is_symmetric, is_ordered=format_.is_ordered)


def packed(matrix: GroupedMatrix, **own: Any) -> CompressedTensorsScheme:
    return CompressedTensorsScheme(label("pack-quantized", {**settings(matrix), **own}, None))


def test_the_packed_layout_is_the_one_written_out() -> None:
    matrix = grouped(16, 96, 4, 32, lowest_zero=0)
    parts = pack_words(matrix, "BF16")
    words = parts["weight_packed"].array().view(np.uint32)
    zeros = parts["weight_zero_point"].array().view(np.uint32)
    assert (words.shape, zeros.shape, parts["weight_scale"].shape) == ((16, 12), (2, 3), (16, 3))
    assert parts["weight_shape"].array().tolist() == [16, 96]
    for n, k in np.ndindex(16, 96):
        assert words[n, k // 8] >> np.uint32(4 * (k % 8)) & 15 == matrix.codes[n, k]
    for n, g in np.ndindex(16, 3):
        assert zeros[n // 8, g] >> np.uint32(4 * (n % 8)) & 15 == matrix.zeros[n, g]
    assert_same(packed(matrix).open(layer(matrix.shape, parts)), matrix)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("group_size", [64, -1])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_packed_integers_of_odd_sizes_come_back(width: int, group_size: int, bits: int, is_symmetric: bool) -> None:
    matrix = grouped(21, width + 1, bits, group_size, lowest_zero=0)
    matrix = symmetric(matrix) if is_symmetric else matrix
    parts = pack_words(matrix, "F16")
    assert ("weight_zero_point" in parts) is not is_symmetric
    assert_same(packed(matrix).open(layer(matrix.shape, parts)), matrix)


@pytest.mark.parametrize("actorder", [True, "group", "dynamic"])
def test_act_order(actorder: Any) -> None:
    matrix = grouped(16, 96, 4, 32, seed=4)
    assert_same(packed(matrix, actorder=actorder).open(layer(matrix.shape, pack_words(matrix, "F16"))), matrix)


@pytest.mark.parametrize("actorder", [None, "weight", "static"])
def test_an_index_that_was_never_filled_is_none(actorder: Any) -> None:
    matrix = grouped(16, 96, 4, 32)
    parts = pack_words(matrix, "F16") | {"weight_g_idx": Part.of("I32", np.full(96, -1))}
    assert_same(packed(matrix, actorder=actorder).open(layer(matrix.shape, parts)), matrix)


def test_zero_points_that_are_not_packed() -> None:
    matrix = grouped(16, 96, 4, 32, lowest_zero=0)
    parts = pack_words(matrix, "F16") | {"weight_zero_point": Part.of("I8", matrix.zeros - np.int16(8))}
    assert_same(packed(matrix).open(layer(matrix.shape, parts)), matrix)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [-1, 32])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_int8_is_signed(bits: int, group_size: int, is_symmetric: bool) -> None:
    matrix = grouped(16, 96, bits, group_size, lowest_zero=0)
    matrix = symmetric(matrix) if is_symmetric else matrix
    parts = pack_bytes(matrix, "BF16")
    np.testing.assert_array_equal(parts["weight"].array(), matrix.codes.astype(int) - (1 << bits - 1))
    opened = CompressedTensorsScheme(label("int-quantized", settings(matrix), INT8_INPUTS))
    tensor = opened.open(layer(matrix.shape, parts))
    assert_same(tensor, matrix)
    assert tensor.activations == Activations("int8", "token")


def test_one_scale_for_all() -> None:
    matrix = symmetric(grouped(16, 96, 8, -1))
    parts = pack_bytes(matrix, "F32") | {"weight_scale": Part.of("F32", np.array([0.5]))}
    stated = {**settings(matrix), "strategy": "tensor"}
    tensor = CompressedTensorsScheme(label("int-quantized", stated, None)).open(layer(matrix.shape, parts))
    np.testing.assert_array_equal(read(tensor), (matrix.codes.astype(float) - 128) * 0.5)
    assert tensor.activations is None


@pytest.mark.parametrize(
    ("weights", "block"),
    [
        (fp8_weights("tensor"), (24, 200)),
        (fp8_weights("channel"), (1, 200)),
        (fp8_weights("block", (8, 64)), (8, 64)),
        ({**fp8_weights("tensor"), "strategy": "group", "group_size": 64}, (1, 64)),
    ],
    ids=str,
)
def test_fp8(weights: dict[str, Any], block: tuple[int, int]) -> None:
    matrix = fp8(24, 200, block)
    parts = pack_fp8(matrix)
    tensor = CompressedTensorsScheme(label("float-quantized", weights, FP8_INPUTS)).open(layer(matrix.shape, parts))
    np.testing.assert_array_equal(read(tensor), values(matrix))
    assert tensor.format == Fp8Format(block)
    assert tensor.activations == Activations("fp8", "token")


def test_static_activations_keep_their_scale() -> None:
    matrix = fp8(24, 200, (24, 200))
    static = {**FP8_INPUTS, "dynamic": False, "strategy": "tensor"}
    opened = CompressedTensorsScheme(label("float-quantized", fp8_weights("tensor"), static))
    tensor = opened.open(layer(matrix.shape, pack_fp8(matrix, input_scale=0.125)))
    assert tensor.activations == Activations("fp8", "tensor", 0.125)
    refused(lambda: opened.open(layer(matrix.shape, pack_fp8(matrix))), "input_scale is missing")
    refused(lambda: opened.open(layer(matrix.shape, pack_fp8(matrix, input_scale=0.0))), "input_scale is 0")


def group(targets: list[str], weights: Mapping[str, Any]) -> dict[str, Any]:
    return {"targets": targets, "weights": dict(weights), "input_activations": None}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["Linear"], ["re:.*up_proj"]),
        (["re:.*up_proj$"], ["model.layers.3.mlp.up_proj"]),
        (["re:.*down_proj", "lm_head"], ["Linear"]),
    ],
)
def test_the_closest_target_counts(first: list[str], second: list[str]) -> None:
    matrix = grouped(16, 96, 4, 32)
    groups = {"a": group(first, integer_weights(8, 16)), "b": group(second, settings(matrix))}
    stated = label("pack-quantized", {}, None) | {"format": "mixed-precision", "config_groups": groups}
    opened = CompressedTensorsScheme(stated).open(layer(matrix.shape, pack_words(matrix, "F16")))
    assert_same(opened, matrix)


@pytest.mark.parametrize(
    ("own", "parts", "message"),
    [
        ({"num_bits": 8}, {}, r"layers\.3\.up \[16, 96\]: weight_packed is I32 \[16, 12\], expected I32 \[16, 24\]"),
        ({"group_size": 48}, {}, r"weight_scale is F16 \[16, 3\]"),
        ({"strategy": "channel"}, {}, "weight_scale is F16"),
        ({"strategy": "tensor"}, {}, "weight_scale is F16"),
        ({"actorder": "group"}, {}, "act-order is stated, but weight_g_idx"),
        ({"actorder": "bogus"}, {}, "actorder is 'bogus', expected one of false"),
        ({}, {"weight_g_idx": Part.of("F32", np.full(96, -1.0))}, r"weight_g_idx is F32 \[96\], expected I32 or I64"),
        ({}, {"weight_g_idx": Part.of("I32", np.full(3, -1))}, r"weight_g_idx is I32 \[3\]"),
        ({}, {"weight_shape": Part.of("I64", np.array([16, 95]))}, r"weight_shape is \[16, 95\]"),
        ({}, {"weight_shape": None}, "weight_shape is missing"),
        ({}, {"weight_zero_point": None}, "weight_zero_point is missing, but the label says asymmetric"),
        ({}, {"weight_g_idx": Part.of("I32", np.full(96, 3))}, "weight_g_idx names groups 3 to 3"),
        ({}, {"bias_scale": Part.of("F16", np.ones(1))}, "bias_scale is no part of it"),
    ],
    ids=str,
)  # fmt: skip
def test_labels_and_parts_that_contradict_each_other(
    own: dict[str, Any], parts: dict[str, Part | None], message: str
) -> None:
    matrix = grouped(16, 96, 4, 32)
    merged = {**pack_words(matrix, "F16"), **parts}
    stored = layer(matrix.shape, {name: part for name, part in merged.items() if part is not None})
    refused(lambda: packed(matrix, **own).open(stored), message)


def test_codes_of_fewer_bits_that_do_not_fit() -> None:
    matrix = symmetric(grouped(16, 96, 4, 32))
    parts = pack_bytes(matrix, "F16")
    parts["weight"] = Part.of("I8", parts["weight"].array() + np.int8(1))
    tensor = CompressedTensorsScheme(label("int-quantized", settings(matrix), None)).open(layer(matrix.shape, parts))
    refused(lambda: tensor.read(0, 16), "weight holds -7 to 8, which are no 4 bits")


STATED = label("pack-quantized", integer_weights(4, 32), None)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-quantized'"),
        ({"sparsity_config": {"format": "sparse-bitmask"}}, "sparse format sparse-bitmask"),
        ({"transform_config": {"config_groups": {}}}, "transformed weights"),
        ({"config_groups": None}, "config_groups is None"),
        ({"config_groups": {"a": {"targets": ["Linear"]}}}, "expected targets, weights"),
        ({"config_groups": {"a": group(["Linear"], {"num_bits": 6})}}, "num_bits is 6"),
        ({"config_groups": {"a": group(["Linear"], {"num_bits": 4, "type": "float"})}}, "num_bits is 4"),
        ({"config_groups": {"a": group(["Linear"], fp8_weights("block"))}}, "strategy block with block_structure None"),
        ({"config_groups": {"a": group(["Linear"], fp8_weights("block", (0, 1)))}}, r"blocks of \[0, 1\]"),
        ({"config_groups": {"a": group(["Linear"], {"num_bits": 8, "strategy": "row"})}}, "strategy is 'row'"),
        ({"config_groups": {"a": group(["Linear"], {}) | {"output_activations": {"num_bits": 8}}}}, "output_activ"),
        ({"config_groups": {"a": group(["re:("], integer_weights(4, 32))}}, "pattern 're:\\('"),
        ({"config_groups": {"a": group(["Conv2d"], integer_weights(4, 32))}}, "no group of the label names it"),
        ({"ignore": ["re:.*up_proj"]}, "the label tells to ignore it"),
    ],
    ids=str,
)  # fmt: skip
def test_labels_that_say_nothing_known(own: dict[str, Any], message: str) -> None:
    matrix = symmetric(grouped(16, 96, 4, 32))
    stored = layer(matrix.shape, pack_words(matrix, "F16"))
    refused(lambda: CompressedTensorsScheme({**STATED, **own}).open(stored), message)


def test_what_cannot_be_written() -> None:
    plain = grouped(8, 96, 4, 32)
    high = GroupedMatrix(4, plain.codes, plain.scales, plain.zeros + np.int16(1), 32)
    for pack in (pack_words, pack_bytes):
        with pytest.raises(ValueError, match="do not fit 4 bits"):
            pack(high, "F16")
    with pytest.raises(ValueError, match="not exact in BF16"):
        pack_fp8(Fp8Matrix(np.zeros((1, 4), np.uint8), np.array([[1 + 2**-12]], np.float32), (1, 4)), "BF16")
