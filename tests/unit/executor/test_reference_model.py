"""The hand-made models are what they claim, and their reference agrees with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.fixtures.models import (
    LLAMA3_SCALING,
    make_rand_model,
    make_script_model,
    reference_generate,
    reference_logits,
)
from tests.fixtures.vocabularies import BOS_ID, END_OF_TURN_ID, EOS_ID

PROMPT = [BOS_ID, *b"The quick brown fox jumps over the lazy dog, twice."]
LLAMA3 = LLAMA3_SCALING | {"factor": 4.0}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
)
def test_reference_logits_equal_those_of_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    make_rand_model(tmp_path, 1, config=config)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0].double()
    # transformers computes in fp32.
    torch.testing.assert_close(reference_logits(tmp_path, PROMPT), expected, atol=2e-3, rtol=0)


def test_every_earlier_token_matters(tmp_path: Path) -> None:
    make_rand_model(tmp_path)
    last = reference_logits(tmp_path, PROMPT)[-1]
    for at in range(len(PROMPT)):
        changed = [*PROMPT[:at], PROMPT[at] ^ 1, *PROMPT[at + 1 :]]
        assert (reference_logits(tmp_path, changed)[-1] - last).abs().max() > 1e-3, at


def test_a_random_models_output_is_varied_and_free_of_special_tokens(tmp_path: Path) -> None:
    output = reference_generate(make_rand_model(tmp_path), PROMPT, 48)
    assert len(output) == 48
    assert len(set(output)) > 24
    assert max(output) < BOS_ID


def test_a_script_is_followed_from_any_prompt(tmp_path: Path) -> None:
    ids = make_script_model(tmp_path, ["Hi", *(bytes([byte]) for byte in "😀😀".encode()), END_OF_TURN_ID, "!"])
    assert reference_generate(tmp_path, PROMPT, 20, stop_ids=[EOS_ID]) == [*ids, EOS_ID]
    assert (
        reference_generate(tmp_path, [7], 20, stop_ids=[END_OF_TURN_ID, EOS_ID]) == ids[: ids.index(END_OF_TURN_ID) + 1]
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(ids) == "Hi😀😀<|im_end|>!"
