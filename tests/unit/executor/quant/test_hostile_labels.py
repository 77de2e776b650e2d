"""Labels made to harm: numbers beyond all measure, other types, patterns that would not end."""

from collections.abc import Callable
from typing import Any

import pytest

from services.executor.quant import awq, gptq
from services.executor.quant import compressed_tensors_pack as compressed
from services.executor.quant import fp8 as fp8_scheme
from services.executor.quant.parts import Part
from services.executor.quant.registry import find_scheme
from services.executor.quant.scheme import pattern
from tests.unit.executor.quant.made import fp8, grouped, layer, refused, symmetric


def opened(label: dict[str, Any], parts: dict[str, Part]) -> Callable[[], object]:
    return lambda: find_scheme(label).open(layer((16, 96), parts))


@pytest.mark.parametrize("size", [10**30, 1 << 31, 0, -2])
def test_group_sizes_beyond_all_measure(size: int) -> None:
    matrix = grouped(16, 96, 4, 32)
    even = symmetric(matrix)
    fp8_parts = compressed.pack_fp8(fp8(16, 96, (1, 32)))
    how = {"is_symmetric": False, "is_ordered": False}
    gptq_label = gptq.label(4, size, zero_format="gptq_v2", **how)  # type: ignore[arg-type]
    grouped_floats = compressed.fp8_weights("channel") | {"strategy": "group", "group_size": size}
    for label, parts in (
        (gptq_label, gptq.pack(matrix, "gptq_v2")),
        (awq.label(size), awq.pack(matrix)),
        (compressed.label("pack-quantized", compressed.integer_weights(4, size), None),
         compressed.pack_words(even, "F16")),
        (compressed.label("float-quantized", grouped_floats, None), fp8_parts),
    ):  # fmt: skip
        refused(opened(label, parts), rf"tensor layers\.3\.up \[16, 96\]: a group size of {size}")


@pytest.mark.parametrize("block", [[10**30, 1], [1, 1 << 31], [True, 1], [-1, 1], [1.0, 1], ["1", 1], [1], 128])
def test_blocks_beyond_all_measure(block: Any) -> None:
    label = {"quant_method": "fp8", "weight_block_size": block}
    refused(opened(label, fp8_scheme.pack(fp8(16, 96, (16, 96)), None)), "blocks of .*, expected rows and columns")


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"sparsity_config": ["dense"]}, "sparse format .'dense'. is not supported"),
        ({"sparsity_config": 3}, "sparse format 3 is not supported"),
        ({"ignore": "lm_head"}, "ignore is 'lm_head', expected a list"),
        ({"ignore": {"lm_head": 1}}, "ignore is .*, expected a list"),
        ({"config_groups": {"a": {"targets": "Linear", "weights": {"num_bits": 4}}}}, "targets is 'Linear', expected"),
        ({"config_groups": {}}, "no group of the label names it"),
    ],
    ids=str,
)  # fmt: skip
def test_labels_of_other_types(own: dict[str, Any], message: str) -> None:
    label = compressed.label("pack-quantized", compressed.integer_weights(4, 32), None) | own
    refused(opened(label, compressed.pack_words(symmetric(grouped(16, 96, 4, 32)), "F16")), message)


@pytest.mark.parametrize(
    "text", ["(a+)+$", "(.*)*x", "(a|a){9}", ".*" * 6, ".?" * 6, "a{1,9}" * 6, "x" * 1001, "(", "a{99999999999}", "\\"]
)
def test_patterns_that_would_not_end(text: str) -> None:
    refused(lambda: pattern("ignore", f"re:{text}", "re:"), "quantization_config: ignore: pattern 're:")


@pytest.mark.parametrize(
    "text",
    [
        r".*lm_head", r"model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj.*", r"^(?!.*vision).*$",
        r".*\.(?:1[0-9]|2[0-9]{1})\..*(?:gate|up)?.*?", r".*self_attn.(q|k|v)_proj$",
    ],
)  # fmt: skip
def test_patterns_as_tools_write_them(text: str) -> None:
    assert pattern("ignore", f"re:{text}", "re:").pattern == text
