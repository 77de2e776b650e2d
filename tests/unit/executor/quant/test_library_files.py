"""Matrices that the compressed-tensors library (0.20.1) wrote, beside what the library reads from them, in bf16."""

import json
from pathlib import Path

import numpy as np
import pytest

from services.executor.models.safetensors_file import SafetensorsFile
from services.executor.quant.parts import Part
from services.executor.quant.registry import find_scheme
from tests.unit.executor.quant.made import layer, read

DATA = Path(__file__).parents[3] / "data" / "quantized" / "compressed_tensors"
LABELS = json.loads(DATA.with_suffix(".json").read_text())


@pytest.mark.parametrize("case", LABELS)
def test_numbers_are_the_librarys(case: str) -> None:
    file = SafetensorsFile(DATA.with_suffix(".safetensors"))
    parts = {name.partition(".")[2]: file.part(name) for name in file.entries if name.startswith(f"{case}.")}
    expected = parts.pop("expected")
    assert len(expected.shape) == 2
    stored = layer((expected.shape[0], expected.shape[1]), parts)
    found = read(find_scheme(LABELS[case]).open(stored)).astype(np.float32)
    bits = found.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    np.testing.assert_array_equal(Part.of("BF16", rounded).floats(), expected.floats())
