"""The table of number formats agrees with the gguf package's."""

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from services.executor.models.ggml_formats import FORMATS, GgmlFormat, format_of, is_readable


def can_dequantize(kind: GGMLQuantizationType) -> bool:
    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize("number", FORMATS)
def test_sizes_and_readability(number: int) -> None:
    kind = GGMLQuantizationType(number)
    assert format_of(number) == GgmlFormat(kind.name, *GGML_QUANT_SIZES[kind], readable=can_dequantize(kind))
    assert is_readable(kind.name) == can_dequantize(kind)


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="99"):
        format_of(99)
    assert not is_readable("Q99_0")
