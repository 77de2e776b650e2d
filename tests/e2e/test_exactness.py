"""Greedy and seeded output is the same alone, among neighbours, in chunks, on a warm prefix and through preemption.

The small model's truth is an uncached forward pass written apart; the real model's truth is transformers in fp32.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.requests import Ids, all_blocks_back, at_once, greedy, ids_of, seeded, status
from tests.e2e.stack import Stack
from tests.fixtures.models import make_rand_model, reference_generate

TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "Q: What is 17 + 25?\nA:",
    "Der Nebel hing tief über dem Fluss, und",
    "人工知能の歴史は",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "The three laws of thermodynamics state that " * 6,
    "🌍🌎🌏 Around the world in",
    '{"name": "quire", "version":',
    "To bake bread you need flour, water, salt and yeast. First,",
    "In 1969 the first people walked on the Moon. " * 12,
    "Dear Sir or Madam,\n\nI am writing to",
    "x",
    "import numpy as np\n\n\nclass Matrix:\n    def __init__(self",
    "La vie est belle parce que",
    "0 1 1 2 3 5 8 13 21",
    "The quick brown fox jumps over the lazy dog. " * 20,
    "Roses are red, violets are blue,",
    "User: How do I sort a list in Python?\nAssistant:",
]


@dataclass(frozen=True)
class Truth:
    model: Path | str
    prompts: list[list[int]]
    answers: list[list[int]]
    tokens: int


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    path = make_rand_model(tmp_path_factory.mktemp("rand"), seed=11)
    draw = random.Random(5)
    lengths = [1, 5, 16, 17, 33, 64, 90, 150]
    prompts = [[draw.randrange(256) for _ in range(length)] for length in lengths]
    return Truth(path, prompts, [reference_generate(path, prompt, 32) for prompt in prompts], 32)


async def check_all(truth: Truth) -> None:
    """Every way of serving the prompts gives the truth's answers."""
    requests = [greedy(prompt, truth.tokens) for prompt in truth.prompts]
    draw = random.Random(3)
    # All ids are far below either vocabulary's end and never special.
    noise = [[draw.randrange(40, 250) for _ in range(draw.randrange(1, 120))] for _ in range(32 - len(requests))]
    neighbours = [seeded(prompt, truth.tokens, seed) for seed, prompt in enumerate(noise)]
    async with Stack(truth.model) as stack:
        alone = [(await ids_of(stack.gateway, [request]))[0] for request in requests]
        assert alone == truth.answers, "alone"
        await all_blocks_back(stack.gateway)
        before = (await status(stack.gateway)).scheduler.kv.prefix_hit_tokens
        warm = [(await ids_of(stack.gateway, [request]))[0] for request in requests]
        assert warm == truth.answers, "on a warm prefix"
        assert (await status(stack.gateway)).scheduler.kv.prefix_hit_tokens > before, "no prefix was reused"
        lone = await ids_of(stack.gateway, neighbours[:1])
        crowd = await ids_of(stack.gateway, requests + neighbours)
        assert crowd[: len(requests)] == truth.answers, "among 31 neighbours"
        assert crowd[len(requests)] == lone[0], "a seeded neighbour"
    for chunk in (16, 64):
        async with Stack(truth.model, scheduler={"step_tokens": chunk}) as stack:
            assert await ids_of(stack.gateway, requests) == truth.answers, f"in chunks of {chunk}"


BLOCK = 32
LOOKAHEAD = 8  # little, so that sequences enter with few blocks and run out of them later


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK)


async def check_preemption(truth: Truth, prompts: list[Ids], answers: list[list[int]]) -> None:
    """Case E1: six streams in a pool for two and a half."""
    longest = max(blocks_of(len(prompt) + truth.tokens) for prompt in prompts)
    requests = [greedy(prompt, truth.tokens) for prompt in prompts]
    async with Stack(truth.model, kv_blocks=int(2.5 * longest), scheduler={"lookahead_tokens": LOOKAHEAD}) as stack:
        assert await at_once(stack, len(requests), ids_of(stack.gateway, requests)) == answers
        # The same once more with seeds, against a run alone.
        draws = [seeded(prompt, truth.tokens, 40 + i, choice_count=1) for i, prompt in enumerate(prompts)]
        together = await ids_of(stack.gateway, draws)
        lone = [(await ids_of(stack.gateway, [draw]))[0] for draw in draws]
        assert together == lone
        assert (await status(stack.gateway)).scheduler.preemption_count > 0, "nothing was preempted"
        await all_blocks_back(stack.gateway)


async def test_small_model_is_exact_however_it_is_served(small: Truth) -> None:
    await check_all(small)


async def test_small_model_survives_preemption(small: Truth) -> None:
    draw = random.Random(8)
    prompts = [[draw.randrange(256) for _ in range(20)] for _ in range(6)]
    truth = Truth(small.model, [], [], 80)
    answers = [reference_generate(Path(small.model), prompt, truth.tokens) for prompt in prompts]
    await check_preemption(truth, prompts, answers)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """SmolLM2, 20 prompts x 48 tokens, from transformers on the same dequantized weights in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    from services.executor.models.source import resolve
    from services.executor.models.tokenizer_bundle import build_bundle
    from services.gateway.tokenizer import ModelTokenizer

    path = resolve("smollm2")
    tokenizer = ModelTokenizer.from_bundle(build_bundle(path))
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    prompts = [tokenizer.encode(text, add_bos=True) for text in TEXTS]
    answers = []
    for prompt in prompts:
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False)
        answers.append(out[0, len(prompt) :].tolist())
    return Truth("smollm2", prompts, answers, 48)


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_real_model_equals_transformers_however_it_is_served(real: Truth) -> None:
    await check_all(real)


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_real_model_survives_preemption(real: Truth) -> None:
    order = sorted(range(len(real.prompts)), key=lambda i: len(real.prompts[i]))[-9:-3]
    await check_preemption(real, [real.prompts[i] for i in order], [real.answers[i] for i in order])
