"""GPTQ: layouts written out by hand, both conventions of zero points, labels that are wrong."""

from typing import Any

import numpy as np
import pytest

from services.executor.quant.gptq import GptqScheme, label, pack
from services.executor.quant.matrix import GroupedFormat, GroupedMatrix
from services.executor.quant.parts import Part
from tests.unit.executor.quant.made import WIDTHS, assert_same, grouped, layer, refused, symmetric

ROWS = 32


def scheme(matrix: GroupedMatrix, zero_format: str = "gptq_v2", **own: Any) -> GptqScheme:
    format_ = matrix.format
    size = -1 if format_.group_size == matrix.shape[1] else format_.group_size
    made = label(
        format_.bits, size, is_symmetric=format_.is_symmetric, is_ordered=format_.is_ordered, zero_format=zero_format
    )
    return GptqScheme({**made, **own})


def by_hand(matrix: GroupedMatrix, lower: int) -> dict[str, Part]:
    """The parts, value by value: input k of output n lies at bits k * bits of column n, and so on."""
    bits, (rows, columns) = matrix.bits, matrix.shape
    groups = matrix.scales.shape[1]
    qweight = np.zeros((columns * bits // 32, rows), np.uint32)
    qzeros = np.zeros((groups, rows * bits // 32), np.uint32)

    def put(words: np.ndarray, at: int, value: int) -> None:
        for bit in range(bits):
            words[(at * bits + bit) // 32] |= np.uint32((value >> bit & 1) << (at * bits + bit) % 32)

    for n in range(rows):
        for k in range(columns):
            put(qweight[:, n], k, int(matrix.codes[n, k]))
        for g in range(groups):
            put(qzeros[g], n, int(matrix.zeros[n, g]) - lower)
    return {
        "qweight": Part.of("I32", qweight.view(np.int32)),
        "qzeros": Part.of("I32", qzeros.view(np.int32)),
        "scales": Part.of_floats("F16", matrix.scales.T),
        "g_idx": Part.of("I32", matrix.column_groups()),
    }


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("zero_format", "lower"), [("gptq", 1), ("gptq_v2", 0)])
@pytest.mark.parametrize("seed", [None, 3], ids=["neighbours", "act-order"])
def test_the_layout_is_the_one_written_out(bits: int, zero_format: str, lower: int, seed: int | None) -> None:
    matrix = grouped(ROWS, 96, bits, 32, lowest_zero=lower, seed=seed)
    parts = by_hand(matrix, lower)
    assert_same(scheme(matrix, zero_format).open(layer(matrix.shape, parts)), matrix)
    written = pack(matrix, zero_format)
    assert written.keys() == parts.keys()
    for name, part in parts.items():
        assert (written[name].format, written[name].shape) == (part.format, part.shape)
        np.testing.assert_array_equal(written[name].data, part.data)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("group_size", [64, -1])
@pytest.mark.parametrize("rows", [1, 30, 33])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_odd_sizes_come_back(width: int, group_size: int, rows: int, bits: int) -> None:
    matrix = grouped(rows, width + 1, bits, group_size, lowest_zero=0)
    assert_same(scheme(matrix).open(layer(matrix.shape, pack(matrix, "gptq_v2"))), matrix)


@pytest.mark.parametrize("scale_format", ["F16", "BF16", "F32"])
def test_scales_in_any_float(scale_format: str) -> None:
    matrix = grouped(ROWS, 96, 4, 32)
    parts = pack(matrix, "gptq") | {"scales": Part.of_floats(scale_format, matrix.scales.T)}
    assert_same(scheme(matrix, "gptq").open(layer(matrix.shape, parts)), matrix)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("zero_format", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("stated", ["gptq", "gptq_v2", None])
def test_a_symmetric_checkpoint_tells_its_own_convention(bits: int, zero_format: str, stated: str | None) -> None:
    matrix = symmetric(grouped(ROWS, 96, bits, 32))
    opened = scheme(matrix, checkpoint_format=stated).open(layer(matrix.shape, pack(matrix, zero_format)))
    assert_same(opened, matrix)
    assert opened.format == GroupedFormat(bits, 32, is_symmetric=True)


GPTQMODEL_STEPS = {2: [0x55555555], 3: [0x24924924, 0x92492492, 0x49249249], 4: [0x11111111], 8: [0x01010101]}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("quantizer", ["gptqmodel:2.2.0", ["gptqmodel:2.2.0", "other:1"]])
def test_zero_points_that_borrowed_from_their_neighbours(bits: int, quantizer: Any) -> None:
    """GPTQModel lowers whole words by a constant, also where a zero point is 0."""
    matrix = grouped(ROWS, 96, bits, 32, lowest_zero=0)
    assert (matrix.zeros == 0).any()
    parts = pack(matrix, "gptq_v2")
    words = parts["qzeros"].array().view(np.uint32)
    lowered = words - np.resize(np.array(GPTQMODEL_STEPS[bits], np.uint32), words.shape[1])
    parts["qzeros"] = Part.of("I32", lowered.view(np.int32))
    assert_same(scheme(matrix, "gptq", meta={"quantizer": quantizer}).open(layer(matrix.shape, parts)), matrix)


def test_the_highest_zero_point_of_older_files() -> None:
    """Stored as 15 of 4 bits, it is 16: no reader of theirs wraps it around."""
    matrix = grouped(ROWS, 96, 4, 32)
    parts = pack(matrix, "gptq")
    parts["qzeros"] = Part.of("I32", np.full((3, 4), -1))
    found = scheme(matrix, "gptq").open(layer(matrix.shape, parts)).read(0, ROWS)
    assert (found.zeros == 16).all()


def test_files_without_act_order_need_no_index() -> None:
    matrix = grouped(ROWS, 96, 4, 32)
    parts = pack(matrix, "gptq_v2")
    for index in (None, np.zeros(96), np.arange(96) // 32):
        kept = {name: part for name, part in parts.items() if name != "g_idx"}
        if index is not None:
            kept["g_idx"] = Part.of("I32", index)
        assert_same(scheme(matrix).open(layer(matrix.shape, kept)), matrix)


def test_an_index_counts_whatever_the_label_says() -> None:
    matrix = grouped(ROWS, 96, 4, 32, seed=2)
    assert_same(scheme(matrix, desc_act=False).open(layer(matrix.shape, pack(matrix, "gptq_v2"))), matrix)


def test_rules_of_gptqmodel_give_matrices_their_own_settings() -> None:
    matrix = grouped(ROWS, 96, 8, 48)
    rules = {r"-:.*\.down_proj": {}, r"+:.*\.3\..*up_proj": {"bits": 8, "group_size": 48}, r".*up_proj": {"bits": 2}}
    common = grouped(ROWS, 96, 4, 32)
    assert_same(scheme(common, dynamic=rules).open(layer(matrix.shape, pack(matrix, "gptq_v2"))), matrix)
    del rules[r"+:.*\.3\..*up_proj"]
    refused(lambda: scheme(common, dynamic=rules).open(layer(matrix.shape, pack(matrix, "gptq_v2"))), "qweight is I32")


def test_what_a_rule_leaves_plain_is_not_stored_quantized() -> None:
    matrix = grouped(24, 96, 4, 32)
    parts = layer(matrix.shape, pack(matrix, "gptq_v2"))
    refused(lambda: scheme(matrix, dynamic={"-:.*up_proj": {}, "+:.*": {}}).open(parts), "rules leave it as it is")
    assert_same(scheme(matrix, dynamic={"-:.*down_proj": {}}).open(parts), matrix)


def index_part(first: int) -> Part:
    """Groups in falling order, which is right where the first is 2."""
    index = 2 - np.arange(96) // 32
    index[0] = first
    return Part.of("I32", index)


@pytest.mark.parametrize(
    ("own", "parts", "message"),
    [
        ({"bits": 8}, {}, r"layers\.3\.up \[32, 96\]: qweight is I32 \[12, 32\], expected I32 \[24, 32\]"),
        ({"bits": 3}, {}, "qweight is I32"),
        ({"group_size": 64}, {}, r"scales is F16 \[3, 32\], expected F16 or BF16 or F32 \[2, 32\]"),
        ({"group_size": -1}, {}, "scales is F16"),
        ({"group_size": 0}, {}, "a group size of 0"),
        ({"desc_act": True}, {"g_idx": None}, "act-order is stated, but g_idx"),
        ({"desc_act": True}, {"g_idx": Part.of("I32", np.zeros(96))}, "act-order is stated, but g_idx"),
        ({}, {"g_idx": index_part(3)}, "g_idx names groups 0 to 3; 96 columns in groups of 32 have 0 to 2"),
        ({}, {"g_idx": index_part(-1)}, "g_idx names groups -1 to 2"),
        ({}, {"g_idx": index_part(1)}, "g_idx puts 31 to 33 columns into groups of 32"),
        ({}, {"g_idx": Part.of("I32", np.zeros(95))}, r"g_idx is I32 \[95\]"),
        ({}, {"qzeros": None}, "qzeros is missing; there are g_idx, qweight, scales"),
        ({}, {"scales": Part.of("I32", np.zeros((3, 32)))}, "scales is I32"),
        ({}, {"weight": Part.of("F16", np.zeros((32, 96)))}, "weight is no part of it"),
        ({"sym": True}, {}, "sym is stated, but zero points differ from 8"),
    ],
    ids=str,
)  # fmt: skip
def test_labels_and_parts_that_contradict_each_other(
    own: dict[str, Any], parts: dict[str, Part | None], message: str
) -> None:
    matrix = grouped(ROWS, 96, 4, 32)
    merged = {**pack(matrix, "gptq_v2"), **parts}
    stored = layer(matrix.shape, {name: part for name, part in merged.items() if part is not None})
    refused(lambda: scheme(matrix, **own).open(stored), message)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"bits": 5}, "bits is 5, expected one of 2, 3, 4, 8"),
        ({"bits": None}, "bits is None"),
        ({"bits": True}, "bits is True"),
        ({"group_size": None}, "group_size is None"),
        ({"group_size": "128"}, "group_size is '128'"),
        ({"desc_act": "no"}, "desc_act is 'no'"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"dynamic": {"+:(": {}}}, "dynamic: "),
        ({"dynamic": ["x"]}, "dynamic is"),
    ],
    ids=str,
)
def test_labels_that_say_nothing_known(own: dict[str, Any], message: str) -> None:
    refused(lambda: scheme(grouped(ROWS, 96, 4, 32), **own), message)


def test_what_cannot_be_written() -> None:
    zero = grouped(ROWS, 96, 4, 32, lowest_zero=0)
    with pytest.raises(ValueError, match="zero points 0 to 15 cannot be stored as gptq"):
        pack(zero, "gptq")
    odd = GroupedMatrix(4, zero.codes, zero.scales * np.float32(1 + 2**-20), zero.zeros, 32)
    with pytest.raises(ValueError, match="not exact in F16"):
        pack(odd, "gptq_v2")
