"""Logits of whole models in every weight format against a float64 pass over the weights that were packed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.fixtures.models import LLAMA3_SCALING, make_rand_model, reference_logits
from tests.fixtures.vocabularies import byte_level
from tests.native import budgets
from tests.native.packed_models import FORMATS, ROUNDS_TO_BF16, SETS, as_multiplied, dequantize, pack_model
from tests.native.runs import Runs, ids_of, relative_error

Shape = dict[str, Any]

SHAPES: dict[str, tuple[Shape, Shape]] = {
    "plain": ({"hidden": 128, "head_size": 32, "intermediate": 256}, {}),
    "a head each": ({"hidden": 128, "heads": 4, "kv_heads": 4}, {"rope_scaling": LLAMA3_SCALING}),
    "three share": ({"hidden": 128, "heads": 6, "kv_heads": 2, "head_size": 64, "intermediate": 384}, {}),
    "eight share": ({"hidden": 128, "heads": 8, "kv_heads": 1, "head_size": 32, "intermediate": 128}, {}),
    "more than share a pass": ({"hidden": 128, "heads": 14, "kv_heads": 1, "head_size": 16, "intermediate": 128}, {}),
    "wide heads": ({"hidden": 128, "heads": 2, "kv_heads": 1, "head_size": 128, "intermediate": 128}, {}),
    "odd sizes": (
        {"hidden": 72, "heads": 3, "kv_heads": 1, "head_size": 80, "intermediate": 100},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 500.0},
    ),
    "biases": (
        {"hidden": 64, "heads": 4, "kv_heads": 2, "head_size": 20, "intermediate": 96},
        {"attention_bias": True, "mlp_bias": True},
    ),
    "tied": ({"hidden": 96, "head_size": 32, "intermediate": 96, "layers": 3}, {"tie_word_embeddings": True}),
    "blocks of 256": ({"hidden": 256, "heads": 2, "kv_heads": 1, "head_size": 128, "intermediate": 512}, {}),
    "blocks over heads": (
        {"hidden": 256, "heads": 8, "kv_heads": 2, "head_size": 32, "intermediate": 256},
        {"tie_word_embeddings": True},
    ),
}
VOCABULARY = byte_level(["more"] * 5)  # 265 tokens: no whole number of panels
TOKENS, PREFILL = 80, 53

Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The model of a shape; each is made once."""
    made: dict[str, Path] = {}

    def make_once(name: str) -> Path:
        if name not in made:
            sizes, config = SHAPES[name]
            made[name] = make_rand_model(
                tmp_path_factory.mktemp("shape"), 5, config=config, vocabulary=VOCABULARY, **sizes
            )
        return made[name]

    return make_once


def check(path: Path, format_: str, folder: Path) -> None:
    """A prompt and some decodes on every instruction set."""
    packed, ids = pack_model(path, format_), ids_of(1, TOKENS, VOCABULARY.size)
    dequantized = dequantize(path, packed, folder / format_)
    expected: dict[bool, NDArray[np.float64]] = {}
    for instruction_set in SETS:
        rounds = instruction_set == ROUNDS_TO_BF16
        if rounds not in expected:
            inputs = as_multiplied(packed, instruction_set)
            expected[rounds] = reference_logits(dequantized, ids, inputs).numpy()
        runs = Runs(packed, instruction_set=instruction_set)
        found = np.concatenate([runs.feed({0: ids[:PREFILL]})[0], runs.whole(0, ids[PREFILL:], 1)])
        names = {"bf16 products" if rounds and name == "bf16" else name for name in packed.formats}
        worst = max(budgets.of(budgets.LOGITS, name) for name in names)
        assert relative_error(found, expected[rounds]) < worst
        if "bf16 products" not in names:  # some row is as exact as without rounding
            rows = zip(found[:16], expected[rounds], strict=False)
            assert min(relative_error(*row) for row in rows) < min(worst, budgets.LOGITS["q8"])


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(make: Make, name: str, tmp_path: Path) -> None:
    """Each shape in fp32, which shows any error, and in a few other formats."""
    path, at = make(name), list(SHAPES).index(name)
    for format_ in ("f32", FORMATS[1 + at], FORMATS[1 + (at + 5) % 9]):
        check(path, format_, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_in_every_format(make: Make, name: str, format_: str, tmp_path: Path) -> None:
    check(make(name), format_, tmp_path)
