"""4 bits that stay packed: which schemes offer them, and that they are the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kernels import _native
from services.executor.models.weights import QuantizedTensor
from services.executor.quant import awq, compressed_tensors_pack, gptq
from services.executor.quant.awq import AwqScheme
from services.executor.quant.compressed_tensors import CompressedTensorsScheme
from services.executor.quant.gptq import GptqScheme
from services.executor.quant.matrix import GroupedMatrix
from services.executor.quant.nibbles import turn_eights
from tests.unit.executor.quant.made import assert_same_nibbles, grouped, layer, symmetric


def from_gptq(matrix: GroupedMatrix) -> QuantizedTensor:
    label = gptq.label(
        matrix.bits,
        matrix.group_size,
        is_symmetric=matrix.format.is_symmetric,
        is_ordered=matrix.format.is_ordered,
        zero_format="gptq_v2",
    )
    return GptqScheme(label).open(layer(matrix.shape, gptq.pack(matrix, "gptq_v2")))


def from_awq(matrix: GroupedMatrix) -> QuantizedTensor:
    return AwqScheme(awq.label(matrix.group_size)).open(layer(matrix.shape, awq.pack(matrix)))


def from_compressed_tensors(matrix: GroupedMatrix) -> QuantizedTensor:
    stated = compressed_tensors_pack.integer_weights(matrix.bits, matrix.group_size)
    label = compressed_tensors_pack.label("pack-quantized", stated, None)
    return CompressedTensorsScheme(label).open(layer(matrix.shape, compressed_tensors_pack.pack_words(matrix, "F16")))


Read = Callable[[GroupedMatrix], QuantizedTensor]

READERS = pytest.mark.parametrize("read", [from_gptq, from_awq, from_compressed_tensors])


@READERS
@pytest.mark.parametrize("width", [32, 96, 104])
def test_four_bits_stay_packed(read: Read, width: int) -> None:
    matrix = symmetric(grouped(40, width, 4, 32))
    assert_same_nibbles(read(matrix), matrix)


@READERS
def test_rows_that_end_within_a_word_do_not(read: Read) -> None:
    assert read(symmetric(grouped(24, 100, 4, 32))).read_nibbles is None


def test_other_bits_do_not() -> None:
    assert from_gptq(symmetric(grouped(32, 64, 3, 32))).read_nibbles is None


def test_columns_in_another_order_do() -> None:
    matrix = symmetric(grouped(32, 64, 4, 32, seed=1))
    assert_same_nibbles(from_gptq(matrix), matrix)


def test_eights_are_turned() -> None:
    words = np.random.default_rng(1).integers(0, 1 << 32, (16, 5), np.uint32)
    rows = [3, 1, 0, 2, 7, 6, 4, 5]
    turned = turn_eights(words[:, 1:4], rows)
    for column in range(16):
        for word in range(3):
            for nibble, row in enumerate(rows):
                code = int(words[column, 1 + word]) >> 4 * nibble & 15
                assert int(turned[column // 8, 8 * word + row]) >> 4 * (column % 8) & 15 == code


def test_files_need_not_align_their_words() -> None:
    words = np.random.default_rng(2).integers(0, 1 << 32, (16, 3), np.uint32)
    odd = np.frombuffer(b"x" + words.tobytes(), np.uint8)[1:].view(np.uint32).reshape(16, 3)
    assert not odd.flags.aligned
    np.testing.assert_array_equal(turn_eights(odd, range(8)), turn_eights(words, range(8)))
    with pytest.raises(ValueError, match="not aligned"):
        _native.turn_nibbles(odd, np.zeros((2, 24), np.uint32), range(8))


def test_what_the_native_code_refuses() -> None:
    words, out = np.zeros((16, 32), np.uint32), np.zeros((2, 256), np.uint32)
    for given, to, rows in (
        (words[:15], out, range(8)),
        (words, out[:, :-1].copy(), range(8)),
        (words, out, [0] * 8),
        (words.T, out, range(8)),
    ):
        with pytest.raises(ValueError, match=r"rows|words"):
            _native.turn_nibbles(given, to, list(rows))
    panels = np.zeros((1, 4 * 576), np.uint8)  # 128 columns in groups of 32
    _native.repack_nibbles(words, panels, 0, 32, 576)
    for given, to, lane, columns, size in (
        (words[:, :31], panels, 0, 32, 576),
        (words, panels, 1, 32, 576),
        (words, panels, -1, 32, 576),
        (words[:12], panels, 0, 32, 576),
        (words[:15], panels, 0, 32, 576),
        (words, panels, 0, 48, 576),
        (words, panels, 0, 32, 500),
        (words, panels[:, :-4].copy(), 0, 32, 576),
    ):
        with pytest.raises(ValueError, match=r"words|panels"):
            _native.repack_nibbles(given, to, lane, columns, size)
    for order in ([0] * 127, [0] * 127 + [128], [-1] + [0] * 127):
        with pytest.raises(ValueError, match=r"words|panels"):
            _native.repack_nibbles(words, panels, 0, 32, 576, np.array(order, np.int32))
