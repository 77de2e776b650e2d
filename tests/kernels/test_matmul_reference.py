"""The reference of packed matrices, on bytes laid out by hand."""

import numpy as np
import pytest

from kernels.matmul.reference import matmul, quantize_activations, unpack


def half(value: float) -> bytes:
    return np.float16(value).tobytes()


def test_four_bits_lie_as_quads_of_rows() -> None:
    packed = np.zeros(2 * (512 + 128), np.uint8)  # one panel of 64 columns in groups of 32 with a minimum
    group, lane = 1, 5
    start = group * 640
    packed[start + 2 * 128 + lane * 4 + 3] = 0xA7  # quad 2: column 11 low, column 27 high
    packed[start + 512 + lane * 2 :][:2] = list(half(0.5))
    packed[start + 576 + lane * 2 :][:2] = list(half(-2))
    expected = np.zeros((32, 64), np.float32)
    expected[lane, 32:] = -2
    expected[lane, 32 + 11], expected[lane, 32 + 27] = 7 * 0.5 - 2, 10 * 0.5 - 2
    np.testing.assert_array_equal(unpack("q4mg32", packed, 32, 64), expected)


def test_larger_groups_are_several_parts_before_one_scale() -> None:
    packed = np.zeros(2 * (64 * 16 + 64), np.uint8)  # two panels of 64 columns in one group
    start = 64 * 16 + 64
    packed[start + 512 + 31 * 4] = 0x9C  # last row, second part: columns 32 and 48
    packed[start + 1024 + 62 :][:2] = list(half(2))
    expected = np.zeros((64, 64), np.float32)
    expected[63] = -16
    expected[63, 32], expected[63, 48] = 8, 2
    np.testing.assert_array_equal(unpack("q4g64", packed, 64, 64), expected)


@pytest.mark.parametrize(("format_", "size"), [("q8", 1088), ("q8c", 1024 + 128)])
def test_bytes_lie_as_quads_of_rows(format_: str, size: int) -> None:
    packed = np.zeros(size, np.uint8)
    packed[3 * 128 + 7 * 4 + 1] = 0x81  # column 13 of row 7
    scale = half(0.25) if format_ == "q8" else np.float32(0.25).tobytes()
    packed[1024 + 7 * len(scale) :][: len(scale)] = list(scale)
    expected = np.zeros((32, 32), np.float32)
    expected[7, 13] = -127 * 0.25
    np.testing.assert_array_equal(unpack(format_, packed, 32, 32), expected)


def test_wide_formats_lie_by_column() -> None:
    wide = np.arange(2 * 32 * 32, dtype=np.float32)  # two panels of 32 columns: [panel][column][row]
    expected = wide.reshape(2, 32, 32).swapaxes(1, 2).reshape(64, 32)
    np.testing.assert_array_equal(unpack("f32", wide.view(np.uint8), 64, 32), expected)
    pairs = np.zeros((16, 32, 2), np.uint16)
    pairs[3, 9, 1] = 0x3F80  # column 7 of row 9
    expected = np.zeros((32, 32), np.float32)
    expected[9, 7] = 1
    np.testing.assert_array_equal(unpack("bf16", pairs.view(np.uint8).reshape(-1), 32, 32), expected)


def test_blocks_of_256_have_their_numbers_first() -> None:
    packed = np.zeros(4736, np.uint8)
    lane, part = 5, 6
    packed[lane * 2 :][:2], packed[64 + lane * 2 :][:2] = list(half(0.5)), list(half(-2))
    packed[128 + part * 32 + lane], packed[384 + part * 32 + lane] = 63, 3
    packed[640 + part * 512 + 2 * 128 + lane * 4 + 3] = 0xA7  # quad 2: column 11 low, column 27 high
    expected = np.zeros((32, 256), np.float32)
    expected[lane, part * 32 :][:32] = -6
    expected[lane, part * 32 + 11], expected[lane, part * 32 + 27] = 7 * 31.5 - 6, 10 * 31.5 - 6
    np.testing.assert_array_equal(unpack("q4k", packed, 32, 256), expected)


def test_six_bits_lie_in_three_words() -> None:
    packed = np.zeros(6720, np.uint8)
    lane, part = 30, 11
    packed[lane * 2 :][:2] = list(half(0.5))
    packed[64 + part * 32 + lane] = 0x80  # -128
    words = packed[576 + part * 384 :][:384].view(np.uint16).reshape(3, 32, 2)
    words[1, lane, 1] = 0b100000_011111_1010  # columns 6 and 7, upper bits of column 15
    words[2, lane, 1] = 0b000001_111111_1101  # columns 10 and 11, lower bits of columns 15 and 14
    expected = np.zeros((32, 256), np.float32)
    columns = {6: -32, 7: 31, 10: 1, 11: -1, 14: 0b01, 15: 0b101011 - 64}
    for column, value in columns.items():
        expected[lane, part * 16 + column] = -64 * value
    np.testing.assert_array_equal(unpack("q6k", packed, 32, 256), expected)


def test_no_other_formats() -> None:
    with pytest.raises(ValueError, match="no format q5g32"):
        unpack("q5g32", np.zeros(640, np.uint8), 32, 32)


def test_activations_round_ties_to_even() -> None:
    x = np.zeros((2, 64), np.float32)
    x[0, :4] = [127, 0.5, 1.5, -2.5]
    x[1, 32:34] = [-254, 3]
    quants, scales = quantize_activations(x)
    np.testing.assert_array_equal(quants[0, :4], [127, 0, 2, -2])
    np.testing.assert_array_equal(quants[1, 32:34], [-127, 2])
    np.testing.assert_array_equal(scales, np.float32([[127, 0], [0, 254]]) * np.float32(1 / 127))


def test_products_of_whole_numbers_are_exact() -> None:
    rng = np.random.default_rng(0)
    weights = rng.integers(-127, 128, (32, 32)).astype(np.int8)
    packed = np.zeros(1088, np.uint8)
    packed[:1024] = weights.reshape(32, 8, 4).swapaxes(0, 1).reshape(-1).view(np.uint8)
    packed[1024:] = np.full(32, 1, np.float16).view(np.uint8)
    x = rng.integers(-32767, 32768, (3, 32)).astype(np.float32)
    x[:, 0] = 32767  # a step is 1
    exact = x.astype(np.float64) @ weights.astype(np.float64).T
    np.testing.assert_allclose(matmul("q8", packed, 32, x), exact, rtol=1e-6)
