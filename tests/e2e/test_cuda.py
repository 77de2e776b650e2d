"""A model served by the cuda backend, on a CPU under Triton's interpreter: the texts are the torch backend's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.requests import greedy, ids_of, seeded
from tests.e2e.stack import Stack
from tests.fixtures.models import make_rand_model, reference_generate

TOKENS = 3
PROMPTS = [[65, 66, 67], list(range(40, 50))]
SIZES = {"max_sequences": 4, "max_step_tokens": 16, "block_size": 16}


async def test_texts_are_those_of_the_torch_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    model = make_rand_model(tmp_path / "m", seed=3, layers=1, context_length=64)
    requests = [greedy(prompt, TOKENS) for prompt in PROMPTS] + [seeded(PROMPTS[0], TOKENS, 11)]
    answers = {}
    for backend in ("torch", "cuda"):
        async with Stack(model, kv_blocks=24, executor=SIZES | {"backend": backend}) as stack:
            answers[backend] = await ids_of(stack.gateway, requests)
            if backend == "cuda":
                assert '"backend": "cuda"' in stack.log("executor") or "backend=cuda" in stack.log("executor")
    assert answers["cuda"] == answers["torch"]
    assert answers["cuda"][:2] == [reference_generate(model, prompt, TOKENS) for prompt in PROMPTS]
