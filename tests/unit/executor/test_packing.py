"""Packed weights against what the checkpoint holds, read back value by value."""

from dataclasses import replace

import gguf
import numpy as np
import pytest

from services.common.errors import QuireError, Reason
from services.executor.backends.cpu.quantize import encode
from services.executor.models.dequantize import to_float32
from services.executor.models.weights import StoredTensor
from tests.unit.executor.packing_fakes import (
    ODD_SPEC,
    SPEC,
    WIDE_SPEC,
    expected_matrix,
    make_checkpoint,
    matrix_names,
    packed,
    random_blocks,
    read_matrix,
    row_order,
    stored,
)

HALF_STEP = 0.5 + 1e-3  # rounding to nearest, with the rounding of fp32 itself


def names(spec) -> list[str]:
    return [name for name in matrix_names(spec) if name != "head" or not spec.tied_embeddings]


@pytest.mark.parametrize("spec", [SPEC, ODD_SPEC, replace(ODD_SPEC, head_size=100, kv_head_count=1)],
                         ids=["whole", "odd", "large heads"])  # fmt: skip
def test_entries_lie_at_their_rows_and_columns(spec) -> None:
    checkpoint = make_checkpoint(spec)
    for number, (name, shape) in enumerate(checkpoint.shapes().items(), 1):
        if len(shape) == 2:
            values = number * 2**16 + np.arange(shape[0])[:, None] * 2**8 + np.arange(shape[1]) % 2**8
            checkpoint.tensors[name] = stored(name, values)
    weights = packed(checkpoint)
    for name in names(spec):
        format_, found = read_matrix(weights, name)
        assert format_ == "f32"
        np.testing.assert_array_equal(found, expected_matrix(checkpoint, name), err_msg=name)
    if spec.tied_embeddings:
        assert weights.matrix("head") == weights.matrix("embedding")


@pytest.mark.parametrize("format_", ["BF16", "F16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_formats_that_are_kept_are_exact(format_: str) -> None:
    checkpoint = make_checkpoint(SPEC, format_)
    if format_ == "F16":  # bf16 holds these exactly
        for name, tensor in checkpoint.tensors.items():
            if len(tensor.shape) == 2:
                checkpoint.tensors[name] = stored(name, np.round(to_float32(tensor) * 32) / 32, "F16")
    weights = packed(checkpoint, threads=2)
    for name in names(SPEC):
        expected = {"BF16": "bf16", "F16": "bf16", "Q4_0": "q4g32", "Q4_1": "q4mg32"}.get(format_, "q8")
        found_format, found = read_matrix(weights, name)
        assert found_format == expected
        np.testing.assert_array_equal(found, expected_matrix(checkpoint, name), err_msg=name)


def test_unpacking_gives_what_gguf_reads() -> None:
    checkpoint = make_checkpoint(WIDE_SPEC, "Q4_0", embedding="Q4_1", down="Q8_0", o="Q5_0")
    checkpoint.tensor("layers.0.down").data.reshape(-1, 34)[:, 2:][:] &= 0x7F
    weights = packed(checkpoint)
    for name in ("embedding", "layers.0.v", "layers.0.down", "layers.0.o"):
        tensor = checkpoint.tensor(name)
        expected = gguf.quants.dequantize(tensor.data, gguf.GGMLQuantizationType[tensor.format])
        np.testing.assert_array_equal(read_matrix(weights, name)[1][: len(expected)], expected, err_msg=name)


@pytest.mark.parametrize(("format_", "expected"), [("Q4_K", "q4k"), ("Q6_K", "q6k")])
@pytest.mark.parametrize("head_size", [64, 96, 256], ids="heads of {}".format)
def test_k_quants_are_exact(format_: str, expected: str, head_size: int) -> None:
    """Blocks may reach over several heads."""
    spec = replace(WIDE_SPEC, head_size=head_size, head_count=8, intermediate_size=512)
    checkpoint = make_checkpoint(spec, format_)
    weights = packed(checkpoint, threads=2)
    assert weights.conversions == ()
    for name in names(spec):
        found_format, found = read_matrix(weights, name)
        assert found_format == expected
        np.testing.assert_array_equal(found, expected_matrix(checkpoint, name), err_msg=name)


def test_k_quants_take_the_nearest_format_where_their_own_does_not_fit() -> None:
    spec = replace(WIDE_SPEC, head_size=80, head_count=16)  # heads are padded to 96
    checkpoint = make_checkpoint(spec, "Q4_K", down="Q6_K", up="Q4_0")
    weights = packed(checkpoint)
    assert weights.conversions == ("Q4_K as bf16 x 1", "Q4_K as q4mg32 x 1")
    found = {name: read_matrix(weights, name) for name in names(spec)}
    assert [found[f"layers.0.{part}"][0] for part in ("q", "o", "gate_up", "down")] == ["q4k", "bf16", "q4mg32", "q6k"]
    np.testing.assert_allclose(found["layers.0.o"][1], expected_matrix(checkpoint, "layers.0.o"), rtol=2**-8)
    # Products of scales and of minima are each rounded by at most 2^-11.
    expected = expected_matrix(checkpoint, "layers.0.gate_up")
    np.testing.assert_allclose(found["layers.0.gate_up"][1], expected, rtol=0, atol=np.abs(expected).max() * 2**-10)


def test_two_k_quants_in_a_matrix_become_the_nearest_q8() -> None:
    checkpoint = make_checkpoint(WIDE_SPEC, "Q4_K", up="Q6_K")
    format_, found = read_matrix(packed(checkpoint), "layers.0.gate_up")
    assert format_ == "q8"
    assert_near(found, expected_matrix(checkpoint, "layers.0.gate_up"), 32, 127)


@pytest.mark.parametrize(("wanted", "steps"), [("q4k", 5), ("q6k", 24)])
def test_k_quants_can_be_made(wanted: str, steps: float) -> None:
    """Small scales are rounded too: to a 63rd of their block's largest, or to a 127th."""
    checkpoint = make_checkpoint(WIDE_SPEC)
    weights = packed(checkpoint, wanted)
    for name in names(WIDE_SPEC):
        format_, found = read_matrix(weights, name)
        assert format_ == wanted
        assert_near(found, expected_matrix(checkpoint, name), 256, steps)


@pytest.mark.parametrize("format_", ["Q5_K", "Q3_K", "Q5_1", "IQ4_NL"])
def test_other_quantizations_become_the_nearest_q8(format_: str) -> None:
    checkpoint = make_checkpoint(WIDE_SPEC, format_)
    weights = packed(checkpoint)
    for name in names(WIDE_SPEC):
        packed_format, found = read_matrix(weights, name)
        assert packed_format == "q8"
        assert_near(found, expected_matrix(checkpoint, name), 32, 127)


def assert_near(found: np.ndarray, expected: np.ndarray, group: int, steps: float) -> None:
    """Whether all values are within half a step, a group's steps reaching to its largest value."""
    groups = expected.reshape(len(expected), -1, group)
    step = np.abs(groups).max(axis=2, keepdims=True) / steps * (1 + 2**-10) + 2**-24
    assert (np.abs(found.reshape(groups.shape) - groups) <= HALF_STEP * step).all()


@pytest.mark.parametrize("source", ["F32", "BF16", "F16", "Q4_0"])
@pytest.mark.parametrize("wanted", ["f32", "bf16", "q8", "q8c", "q4g32", "q4mg32"])
def test_any_format_can_be_asked_for(source: str, wanted: str) -> None:
    checkpoint = make_checkpoint(SPEC, source)
    weights = packed(checkpoint, wanted)
    for name in names(SPEC):
        format_, found = read_matrix(weights, name)
        assert format_ == wanted
        expected = expected_matrix(checkpoint, name)
        match wanted:
            case "f32":
                np.testing.assert_array_equal(found, expected)
            case "bf16":
                np.testing.assert_allclose(found, expected, rtol=2**-8)
            case "q8":
                assert_near(found, expected, 32, 127)
            case "q8c":
                assert_near(found, expected, expected.shape[1], 127)
            case "q4g32" | "q4mg32":
                # The shorter end of q4g32 reaches 7 of 8 steps: a value there may be cut by a whole one.
                assert_near(found, expected, 32, 4 if wanted == "q4g32" else 7)
    if source == "Q4_0" and wanted in ("q8", "q4g32", "q4mg32"):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("minimum", ["", "m"])
def test_larger_groups(size: int, minimum: str) -> None:
    checkpoint = make_checkpoint(replace(WIDE_SPEC, head_size=128, head_count=2, kv_head_count=1))
    weights = packed(checkpoint, f"q4{minimum}g{size}")
    for name in names(WIDE_SPEC):
        format_, found = read_matrix(weights, name)
        assert format_ == f"q4{minimum}g{size}"
        assert_near(found, expected_matrix(checkpoint, name), size, 7 if minimum else 4)


def test_heads_that_groups_would_straddle_are_bf16_in_o_alone() -> None:
    checkpoint = make_checkpoint(replace(SPEC, head_size=48), "Q4_0")
    weights = packed(checkpoint)
    format_, found = read_matrix(weights, "layers.1.o")
    assert format_ == "bf16"
    np.testing.assert_allclose(found, expected_matrix(checkpoint, "layers.1.o"), rtol=2**-8)
    format_, found = read_matrix(weights, "layers.1.q")
    assert format_ == "q4g32"
    np.testing.assert_array_equal(found, expected_matrix(checkpoint, "layers.1.q"))
    assert weights.conversions == ("Q4_0 as bf16 x 2",)


def test_gate_and_up_share_the_more_precise_format() -> None:
    checkpoint = make_checkpoint(SPEC, "Q4_0", up="Q4_1", v="Q8_0")
    weights = packed(checkpoint)
    assert [read_matrix(weights, f"layers.0.{part}")[0] for part in ("q", "v", "gate_up")] == ["q4g32", "q8", "q4mg32"]
    np.testing.assert_array_equal(
        read_matrix(weights, "layers.1.gate_up")[1], expected_matrix(checkpoint, "layers.1.gate_up")
    )


@pytest.mark.parametrize("spec", [SPEC, ODD_SPEC], ids=["whole", "odd"])
def test_vectors_lie_in_the_order_of_their_matrix(spec) -> None:
    checkpoint = make_checkpoint(spec)
    weights = packed(checkpoint)

    def read(name: str, length: int) -> list[float]:
        offset = weights.vector(name)
        assert offset % 64 == 0
        return weights.buffer[offset : offset + length * 4].view(np.float32).tolist()

    def expected(*matrices: str) -> list[float]:
        places = [place for matrix in matrices for place in row_order(spec, "layers.0." + matrix)]
        return [float(to_float32(checkpoint.tensor(p[0] + "_bias"))[p[1]]) if p else 0.0 for p in places]

    for norm in ("layers.0.attention_norm", "layers.0.mlp_norm", "final_norm"):
        gains = to_float32(checkpoint.tensor(norm)).tolist()
        padded = -(-spec.hidden_size // 32) * 32
        assert read(norm, padded) == gains + [0.0] * (padded - len(gains))
    biases = {"qkv_bias": ("q", "k", "v"), "o_bias": ("o",), "gate_up_bias": ("gate_up",), "down_bias": ("down",)}
    for name, matrices in biases.items():
        if not spec.attention_bias:
            assert weights.vector("layers.0." + name) == -1
        else:
            values = expected(*matrices)
            assert read("layers.0." + name, len(values)) == values


def test_the_result_does_not_depend_on_threads() -> None:
    checkpoint = make_checkpoint(replace(WIDE_SPEC, vocab_size=5000), "Q6_K")
    assert packed(checkpoint, threads=1).buffer.tobytes() == packed(checkpoint, threads=5).buffer.tobytes()


BAD_HALF = {"nan": np.float16(np.nan), "inf": np.float16(np.inf)}


@pytest.mark.parametrize("bad", BAD_HALF)
@pytest.mark.parametrize(
    ("format_", "at"),
    [("Q4_0", 0), ("Q4_1", 0), ("Q4_1", 2), ("Q5_0", 0), ("Q8_0", 0), ("Q4_K", 0), ("Q4_K", 2), ("Q6_K", 208)],
)
def test_bad_scales_are_found_in_the_last_row(format_: str, at: int, bad: str) -> None:
    checkpoint = make_checkpoint(WIDE_SPEC, "Q4_0")
    tensor = random_blocks("layers.0.k", checkpoint.shapes()["layers.0.k"], format_, np.random.default_rng(1))
    checkpoint.tensors["layers.0.k"] = tensor
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[format_]][1]
    if format_ == "Q4_K":  # infinity times zero is found too
        tensor.data[-1, -size + 4 : -size + 16] = 0
    tensor.data[-1, -size + at :][:2] = BAD_HALF[bad].reshape(1).view(np.uint8)
    assert_refused(checkpoint, "auto", r"tensor layers\.0\.k holds NaN or infinity")


@pytest.mark.parametrize(
    ("format_", "value", "wanted"),
    [
        ("F32", np.nan, "auto"),
        ("F32", -np.inf, "auto"),
        ("F32", np.nan, "q8"),
        ("F32", np.inf, "q4mg32"),
        ("F32", 3.4e38, "bf16"),
        ("F32", 1e8, "q8"),
        ("F32", 1e8, "q4g32"),
        ("F32", -1e5, "q4mg32"),
        ("F16", np.inf, "auto"),
        ("BF16", np.nan, "auto"),
        ("BF16", -np.inf, "auto"),
        ("BF16", np.nan, "f32"),
    ],
)
def test_bad_values_are_found(format_: str, value: float, wanted: str) -> None:
    checkpoint = make_checkpoint(SPEC, format_)
    values = to_float32(checkpoint.tensor("layers.1.up")).copy()
    values[-1, -1] = value
    checkpoint.tensors["layers.1.up"] = stored("layers.1.up", values, format_)
    assert_refused(checkpoint, wanted, r"tensor layers\.1\.up holds (NaN or|values too large)")


@pytest.mark.parametrize("name", ["final_norm", "layers.0.mlp_norm", "layers.0.v_bias", "layers.0.up_bias"])
def test_bad_vectors_are_found(name: str) -> None:
    checkpoint = make_checkpoint(ODD_SPEC)
    values = to_float32(checkpoint.tensor(name)).copy()
    values[-1] = np.nan
    checkpoint.tensors[name] = stored(name, values)
    assert_refused(checkpoint, "auto", f"tensor {name} holds NaN or infinity")


def assert_refused(checkpoint, wanted: str, message: str) -> None:
    with pytest.raises(QuireError, match=message) as error:
        packed(checkpoint, wanted, threads=2)
    assert error.value.reason is Reason.MODEL_LOAD_FAILED


def test_tiny_values_fit_their_steps() -> None:
    """Scales below fp16's normal range are coarse; a group must not overflow its int8 for it."""
    for peak in (1e-3, 1e-5, 3e-6, 1e-7, 1e-9, 0.0):
        values = np.linspace(-peak, peak, 32, dtype=np.float32)[None]
        rows = encode("q8", values)
        assert rows.scales is not None
        scale = float(rows.scales[0, 0])
        assert scale <= peak / 127 + 2**-24
        np.testing.assert_allclose(rows.words.view(np.int8).reshape(1, 32) * scale, values, atol=HALF_STEP * scale)


def test_stored_rows_are_not_changed() -> None:
    checkpoint = make_checkpoint(ODD_SPEC)
    before = {name: tensor.data.copy() for name, tensor in checkpoint.tensors.items()}
    packed(checkpoint)
    for name, tensor in checkpoint.tensors.items():
        assert isinstance(tensor, StoredTensor)
        np.testing.assert_array_equal(tensor.data, before[name])
