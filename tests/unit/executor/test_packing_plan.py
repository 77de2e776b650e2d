"""Which format a matrix takes, how large it is, and where it lies."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import kernels.matmul
from services.executor.backends.cpu.formats import (
    FORMATS,
    choose,
    group_size,
    has_minimum,
    has_zero,
    more_precise,
    panel_bytes,
)
from services.executor.backends.cpu.layout import PaddedSizes
from services.executor.backends.cpu.packing_plan import make_plan
from services.executor.models.weights import expected_shapes
from tests.unit.executor.packing_fakes import ODD_SPEC, SPEC, matrix_names, panel_size, row_order


@pytest.mark.parametrize(
    ("stored", "wanted", "run", "expected"),
    [
        ("F32", "auto", 42, "f32"),
        ("F16", "auto", 42, "bf16"),
        ("BF16", "auto", 42, "bf16"),
        ("Q4_0", "auto", 64, "q4g32"),
        ("Q4_1", "auto", 64, "q4mg32"),
        ("Q4_K", "auto", 256, "q4k"),
        ("Q4_K", "auto", 1280, "q4k"),
        ("Q4_K", "auto", 96, "q4mg32"),
        ("Q4_K", "auto", 80, "bf16"),
        ("Q8_0", "auto", 64, "q8"),
        ("Q5_0", "auto", 64, "q8"),
        ("Q6_K", "auto", 256, "q6k"),
        ("Q6_K", "auto", 128, "q8"),
        ("Q6_K", "auto", 48, "bf16"),
        ("IQ4_NL", "auto", 64, "q8"),
        ("Q4_0", "auto", 48, "bf16"),
        ("Q8_0", "auto", 20, "bf16"),
        ("BF16", "q8", 42, "bf16"),
        ("BF16", "q8", 64, "q8"),
        ("BF16", "q8c", 42, "q8c"),
        ("F32", "q4mg128", 64, "bf16"),
        ("F32", "q4mg128", 256, "q4mg128"),
        ("Q4_0", "f32", 48, "f32"),
    ],
)
def test_choice(stored: str, wanted: str, run: int, expected: str) -> None:
    assert choose(stored, wanted, run) == expected


def test_formats_are_those_of_the_kernels() -> None:
    header = (Path(kernels.matmul.__file__).parent / "format.h").read_text()
    listed = re.search(r"enum Format : int32_t \{(.*?)kFormatCount", header, re.DOTALL)
    assert listed is not None
    names = re.findall(r"\bk(\w+),", re.sub(r"//.*", "", listed[1]))
    ours = [re.sub(r"g(\d+)$", r"group\1", name.replace("q4m", "q4min")) for name in FORMATS]
    assert ours == [name.lower() for name in names]
    assert list(FORMATS.values()) == list(range(len(names)))


@pytest.mark.parametrize("format_", FORMATS)
def test_panels_are_as_large_as_told(format_: str) -> None:
    for k in (256, 768, 1536):
        assert panel_bytes(format_, k) == panel_size(format_, k)
    assert has_minimum(format_) == ("m" in format_ or format_ == "q4k")
    assert has_zero(format_) == ("z" in format_)
    grouped = re.fullmatch(r"q4[mz]?g(\d+)", format_)
    assert group_size(format_) == (int(grouped[1]) if grouped else {"q8": 32, "q4k": 256, "q6k": 256}.get(format_, 1))


def test_two_tensors_in_a_matrix_take_the_more_precise_format() -> None:
    assert more_precise("q4g32", "q4mg32") == more_precise("q4mg32", "q4g32") == "q4mg32"
    assert more_precise("q4mg32", "q8") == "q8"
    assert more_precise("q8", "bf16") == "bf16"
    assert more_precise("f32", "bf16") == "f32"
    assert more_precise("q4k", "q4k") == "q4k"
    assert more_precise("q4k", "q4g32") == "q4mg32"
    assert more_precise("q6k", "q4k") == more_precise("q4k", "q6k") == "q8"
    assert more_precise("q4g64", "q4zg128") == more_precise("q4zg128", "q4g64") == "q4zg64"
    assert more_precise("q4g128", "q4g32") == "q4g32"
    assert more_precise("q4g128", "q8") == more_precise("f8", "q4zg32") == more_precise("f8", "q8c") == "q8"
    assert more_precise("f8", "bf16") == "bf16"


def test_sizes_are_padded() -> None:
    assert PaddedSizes.of(SPEC) == PaddedSizes(hidden=96, head=32, intermediate=160)
    assert PaddedSizes.of(ODD_SPEC) == PaddedSizes(hidden=64, head=32, intermediate=64)
    assert PaddedSizes.of(replace(SPEC, head_size=100)).head == 128


@pytest.mark.parametrize("spec", [SPEC, ODD_SPEC], ids=["whole", "odd"])
def test_parts_lie_apart_in_whole_lines(spec) -> None:
    plan = make_plan(spec, dict.fromkeys(expected_shapes(spec), "F32"), "auto")
    ranges = [(m.offset, m.layout.rows // 32 * m.panel_bytes) for m in plan.matrices]
    ranges += [(v.offset, v.layout.length * 4) for v in plan.vectors]
    end = 0
    for offset, size in sorted(ranges):
        assert offset >= end
        assert offset % 64 == 0
        end = offset + size
    assert end <= plan.size < end + 64
    assert {m.layout.name for m in plan.matrices} == set(matrix_names(spec)) - (
        {"head"} if spec.tied_embeddings else set()
    )
    for matrix in plan.matrices:
        assert matrix.layout.rows == len(list(row_order(spec, matrix.layout.name)))


def test_conversions_are_counted_and_kept_formats_are_not() -> None:
    stored = dict.fromkeys(expected_shapes(SPEC), "Q4_0")
    stored |= {"layers.0.down": "Q6_K", "layers.1.down": "Q6_K", "layers.1.gate": "Q4_1", "head": "F16"}
    plan = make_plan(SPEC, stored, "auto")
    assert plan.formats == "q4g32 x 10, q8 x 2, q4mg32 x 1, bf16 x 1"
    assert plan.conversions == ("Q6_K as q8 x 2", "F16 as bf16 x 1")
    assert make_plan(SPEC, dict.fromkeys(stored, "F32"), "auto").conversions == ()
    assert make_plan(SPEC, dict.fromkeys(stored, "BF16"), "q8").conversions == ("BF16 as q8 x 16",)
