"""Quantized checkpoints, served: greedy answers are those of the same numbers written out plainly.

The truth is an uncached forward pass written apart, over the plain folder.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.requests import greedy, ids_of
from tests.e2e.stack import Stack
from tests.fixtures.models import make_rand_model, reference_generate
from tests.fixtures.quantized import quantize_folder

PROMPTS = [[65, 66, 67], list(range(40, 90))]
TOKENS = 12


@pytest.mark.parametrize(
    ("scheme", "backend"),
    [("gptq-4-ordered", "torch"), ("awq", "torch")],
)
async def test_answers_are_the_plain_models(tmp_path: Path, scheme: str, backend: str) -> None:
    quantized, same = quantize_folder(make_rand_model(tmp_path / "m", seed=3), scheme)
    expected = [reference_generate(same, prompt, TOKENS) for prompt in PROMPTS]
    async with Stack(quantized, executor={"backend": backend}) as stack:
        assert await ids_of(stack.gateway, [greedy(prompt, TOKENS) for prompt in PROMPTS]) == expected
