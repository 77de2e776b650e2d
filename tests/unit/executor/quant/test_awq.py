"""AWQ: the order of nibbles, of weights and of zero points alike."""

from typing import Any

import numpy as np
import pytest

from services.executor.quant.awq import AwqScheme, label, pack
from services.executor.quant.matrix import GroupedFormat, GroupedMatrix
from services.executor.quant.parts import Part
from tests.unit.executor.quant.made import WIDTHS, assert_same, grouped, layer, refused, symmetric


def by_hand(values: np.ndarray) -> Part:
    """[n, N] value by value: of each eight, the nibbles from low to high are outputs 0, 2, 4, 6, 1, 3, 5, 7."""
    words = np.zeros((len(values), values.shape[1] // 8), np.uint32)
    for row in range(len(values)):
        for output in range(values.shape[1]):
            nibble = [0, 2, 4, 6, 1, 3, 5, 7].index(output % 8)
            words[row, output // 8] |= np.uint32(int(values[row, output]) << 4 * nibble)
    return Part.of("I32", words.view(np.int32))


def test_the_layout_is_the_one_written_out() -> None:
    matrix = grouped(24, 96, 4, 32, lowest_zero=0)
    parts = {
        "qweight": by_hand(matrix.codes.T),
        "qzeros": by_hand(matrix.zeros.T),
        "scales": Part.of_floats("F16", matrix.scales.T),
    }
    assert_same(AwqScheme(label(32)).open(layer(matrix.shape, parts)), matrix)
    written = pack(matrix)
    assert written.keys() == parts.keys()
    for name, part in parts.items():
        assert (written[name].format, written[name].shape) == (part.format, part.shape)
        np.testing.assert_array_equal(written[name].data, part.data)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("group_size", [64, -1])
@pytest.mark.parametrize("rows", [8, 21])
def test_odd_sizes_come_back(width: int, group_size: int, rows: int) -> None:
    matrix = grouped(rows, width, 4, group_size, lowest_zero=0)
    assert_same(AwqScheme(label(group_size)).open(layer(matrix.shape, pack(matrix))), matrix)


def test_older_names_of_the_settings() -> None:
    matrix = symmetric(grouped(24, 96, 4, 32))
    opened = AwqScheme({"w_bit": 4, "q_group_size": 32, "version": "GEMM"}).open(layer(matrix.shape, pack(matrix)))
    assert_same(opened, matrix)
    assert opened.format == GroupedFormat(4, 32, is_symmetric=True)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"bits": 3}, "bits is 3, expected one of 4"),
        ({"version": "gemv"}, "version is 'gemv', expected one of gemm"),
        ({"group_size": None}, "group_size is None"),
        ({"group_size": 64}, r"qzeros is I32 \[3, 3\], expected I32 \[2, 3\]"),
    ],
    ids=str,
)
def test_labels_that_do_not_fit(own: dict[str, Any], message: str) -> None:
    matrix = grouped(24, 96, 4, 32)
    refused(lambda: AwqScheme({**label(32), **own}).open(layer(matrix.shape, pack(matrix))), message)


def test_a_checkpoint_of_gptq_is_not_taken_for_one_of_awq() -> None:
    from services.executor.quant import gptq

    matrix = grouped(32, 96, 4, 32)
    refused(lambda: AwqScheme(label(32)).open(layer(matrix.shape, gptq.pack(matrix, "gptq"))), "g_idx is no part of it")
    parts = gptq.pack(matrix, "gptq")
    del parts["g_idx"]
    refused(lambda: AwqScheme(label(32)).open(layer(matrix.shape, parts)), r"qweight is I32 \[12, 32\]")


def test_what_cannot_be_written() -> None:
    for matrix in (grouped(8, 96, 3, 32), grouped(8, 96, 4, 32, seed=1)):
        with pytest.raises(ValueError, match="AWQ stores 4 bits in neighbouring groups"):
            pack(matrix)
    plain = grouped(8, 96, 4, 32)
    with pytest.raises(ValueError, match="do not fit 4 bits"):
        pack(GroupedMatrix(4, plain.codes, plain.scales, plain.zeros + np.int16(1), 32))
