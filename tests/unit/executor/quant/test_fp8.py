"""The label `fp8`: blocks in DeepSeek's manner, one scale a matrix or a row, activations."""

from typing import Any

import numpy as np
import pytest

from services.executor.models.weights import Activations
from services.executor.quant.fp8 import Fp8Scheme, label, pack
from services.executor.quant.matrix import Fp8Format
from services.executor.quant.parts import Part
from tests.unit.executor.quant.made import fp8, layer, read, refused, values


@pytest.mark.parametrize("shape", [(256, 256), (128, 128), (130, 200), (96, 129), (40, 40)])
def test_blocks(shape: tuple[int, int]) -> None:
    """Also short ones at the ends; scales are multiplied though their name says inverse."""
    matrix = fp8(*shape, (128, 128))
    tensor = Fp8Scheme(label((128, 128))).open(layer(shape, pack(matrix, (128, 128))))
    assert tensor.activations == Activations("fp8", "group")
    assert tensor.format == Fp8Format((128, 128))
    found = tensor.read(0, shape[0])
    np.testing.assert_array_equal(found.codes, matrix.codes)
    np.testing.assert_array_equal(read(tensor), values(matrix))


@pytest.mark.parametrize("scale_shape", [(), (1,), (1, 1)])
def test_one_scale_for_all(scale_shape: tuple[int, ...]) -> None:
    matrix = fp8(24, 96, (24, 96))
    parts = pack(matrix, None) | {"weight_scale": Part.of("F32", matrix.scales.reshape(scale_shape))}
    tensor = Fp8Scheme(label(None)).open(layer(matrix.shape, parts))
    np.testing.assert_array_equal(read(tensor), values(matrix))
    assert tensor.activations == Activations("fp8", "token")


@pytest.mark.parametrize("scale_shape", [(24,), (24, 1)])
def test_one_scale_a_row(scale_shape: tuple[int, ...]) -> None:
    matrix = fp8(24, 96, (1, 96))
    parts = {"weight": Part.of("F8_E4M3", matrix.codes),
             "weight_scale": Part.of_floats("BF16", matrix.scales.reshape(scale_shape))}  # fmt: skip
    np.testing.assert_array_equal(read(Fp8Scheme(label(None)).open(layer(matrix.shape, parts))), values(matrix))


def test_static_activations_keep_their_scale() -> None:
    matrix = fp8(24, 96, (24, 96))
    tensor = Fp8Scheme(label(None, "static")).open(layer(matrix.shape, pack(matrix, None, input_scale=0.75)))
    assert tensor.activations == Activations("fp8", "tensor", 0.75)


@pytest.mark.parametrize(
    ("own", "parts", "message"),
    [
        ({}, {"weight_scale": None}, r"layers\.3\.up \[24, 96\]: weight_scale is missing; there are weight"),
        ({}, {"weight_scale": Part.of("F32", np.ones(2))}, r"weight_scale is F32 \[2\], expected"),
        ({}, {"weight": Part.of("I8", np.ones((24, 96)))}, "weight is I8"),
        ({}, {"weight": Part.of("F8_E4M3", np.ones((24, 95)))}, r"weight is F8_E4M3 \[24, 95\]"),
        ({"activation_scheme": "static"}, {}, "input_scale is missing"),
        ({"activation_scheme": "static"}, {"input_scale": Part.of("F32", np.full((), np.nan))}, "input_scale is nan"),
        ({"activation_scheme": "tensor"}, {}, "activation_scheme is 'tensor'"),
        ({"weight_block_size": [16, 16]}, {}, r"weight_scale is F32 \[\], expected F16 or BF16 or F32 \[2, 6\]"),
        ({"weight_block_size": [16]}, {}, r"blocks of \[16\]"),
        ({"weight_block_size": [16, 0]}, {}, r"blocks of \[16, 0\]"),
        ({}, {"k_scale": Part.of("F32", np.ones(1))}, "k_scale is no part of it"),
    ],
    ids=str,
)
def test_labels_and_parts_that_contradict_each_other(
    own: dict[str, Any], parts: dict[str, Part | None], message: str
) -> None:
    matrix = fp8(24, 96, (24, 96))
    merged = {**pack(matrix, None), **parts}
    stored = layer(matrix.shape, {name: part for name, part in merged.items() if part is not None})
    refused(lambda: Fp8Scheme({**label(None), **own}).open(stored), message)


def test_what_cannot_be_written() -> None:
    for matrix, block in ((fp8(24, 96, (1, 96)), None), (fp8(24, 96, (8, 32)), (128, 128))):
        with pytest.raises(ValueError, match="are stated"):
            pack(matrix, block)
