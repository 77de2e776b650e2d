"""Packing against one large integer a row."""

import numpy as np
import pytest

from services.executor.quant.bits import pack_bits, unpack_bits, unpack_window, word_count

WIDTHS = (2, 3, 4, 8)


def coded(rows: int, count: int, bits: int) -> np.ndarray:
    row, column = np.ogrid[:rows, :count]
    return ((row * 5 + column * 3 + 1) % (1 << bits)).astype(np.uint8)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("count", [1, 7, 31, 32, 33, 96, 100, 161])
def test_values_lie_one_after_the_other(bits: int, count: int) -> None:
    values = coded(3, count, bits)
    words = pack_bits(values, bits)
    assert words.shape == (3, word_count(count, bits))
    for row in range(3):
        whole = sum(int(value) << (i * bits) for i, value in enumerate(values[row]))
        assert [whole >> (32 * i) & 0xFFFFFFFF for i in range(words.shape[1])] == words[row].tolist()
    np.testing.assert_array_equal(unpack_bits(words, bits, count), values)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize(("start", "stop"), [(0, 100), (0, 1), (31, 33), (64, 96), (50, 99), (99, 100)])
def test_a_window_reads_its_own_values(bits: int, start: int, stop: int) -> None:
    values = coded(2, 100, bits)
    np.testing.assert_array_equal(unpack_window(pack_bits(values, bits), bits, start, stop), values[:, start:stop])


def test_words_may_be_columns_of_a_larger_array() -> None:
    values = coded(40, 9, 4)
    words = pack_bits(values.T, 4)  # [9, 5]
    np.testing.assert_array_equal(unpack_bits(words[2:7], 4, 40), values.T[2:7])
    np.testing.assert_array_equal(unpack_bits(np.ascontiguousarray(words.T)[:, 2:7].T, 4, 40), values.T[2:7])
