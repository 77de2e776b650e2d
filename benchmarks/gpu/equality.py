"""Models of both backends over the same weights: the same tokens, and nearly the same logits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu.models import meant, on_cuda, on_torch, random_weights
from benchmarks.gpu.report import Row
from benchmarks.gpu.runs import generate
from benchmarks.gpu.setting import Setting
from services.executor.backends.base import Backend, SamplingRule, StepInputs
from services.executor.backends.cuda.backend import DTYPES, StepSizes

SIZES = StepSizes(sequences=4, tokens=256)
LAYERS = 8
"""Of models whose tokens are to be equal: each layer makes differences of rounding grow, by half in random models."""
FEW_LAYERS = 2
"""Of models in 8 and 16 bits, whose differences are larger from the start."""
MOST_ERROR = {"plain": 0.05, "int8": 0.12, "fp8": 0.35}
"""Of logits, in parts of their size. Twice what rounding products' operands to these formats gave PyTorch on a CPU."""


def equality(setting: Setting) -> Iterator[Row]:
    """Greedy and seeded tokens in fp32, plain and in 4 bits; logits in 8 and 16 bits beside those of fp32."""
    device = setting.device
    # Heads of their own: with tied ones, a few layers would hardly change which token is the likeliest.
    spec = replace(setting.small, layer_count=min(setting.small.layer_count, LAYERS), tied_embeddings=False)
    steps, length = setting.sized(32, 2), setting.sized(200, 8)
    draw = random.Random(3)
    prompts = [[draw.randrange(spec.vocab_size) for _ in range(length - 5 * i)] for i in range(2)]
    blocks = 4 * (-(-(length + steps) // 16))
    weights = random_weights(spec, torch.float32, setting.place)
    ours = on_cuda(spec, weights, device, dtype="fp32", sizes=SIZES, blocks=blocks)
    theirs = on_torch(spec, weights, device, dtype="fp32", blocks=blocks)
    for name, rule in (("greedy", SamplingRule(temperature=0.0)), ("seeded", SamplingRule(temperature=1.0, seed=7))):
        found, expected = (generate(one, 16, prompts, steps, 64, rule) for one in (ours, theirs))
        yield Row(f"{name} tokens equal, fp32", _share(found, expected), "", 1.0)
    fixed = on_cuda(spec, weights, device, dtype="fp32", sizes=SIZES, blocks=blocks, fixed_splits=True)
    together = generate(fixed, 16, prompts, steps, 64)
    alone = [generate(fixed, 16, [prompt], steps, 33)[0] for prompt in prompts]
    yield Row("tokens equal alone and together, fixed splits", _share(together, alone), "", 1.0)

    ours = on_cuda(spec, weights, device, dtype="fp32", format_="int4", sizes=SIZES, blocks=blocks)
    theirs = on_torch(spec, meant(weights, "int4"), device, dtype="fp32", blocks=blocks)
    found, expected = (generate(one, 16, prompts, steps, 64) for one in (ours, theirs))
    yield Row("greedy tokens equal, 4 bits in fp32", _share(found, expected), "", 1.0)

    spec = replace(spec, layer_count=min(spec.layer_count, FEW_LAYERS))
    weights = random_weights(spec, DTYPES[setting.dtype], setting.place)
    for format_, most in MOST_ERROR.items():
        ours = on_cuda(spec, weights, device, dtype=setting.dtype, format_=format_, sizes=SIZES, blocks=blocks)
        theirs = on_torch(spec, meant(weights, format_), device, dtype="fp32", blocks=blocks)
        logits, expected_logits = (_logits(one, prompts[0]) for one in (ours, theirs))
        error = np.linalg.norm(logits - expected_logits) / np.linalg.norm(expected_logits)
        yield Row(f"error of logits, {format_} in {setting.dtype}", float(error), "of them", most, "at most")


def _share(found: list[list[int]], expected: list[list[int]]) -> float:
    """Of tokens before the first difference of each sequence, in all."""
    pairs = [list(zip(one, other, strict=True)) for one, other in zip(found, expected, strict=True)]
    equal = sum(next((i for i, (a, b) in enumerate(pair) if a != b), len(pair)) for pair in pairs)
    return equal / sum(map(len, pairs))


def _logits(backend: Backend, prompt: list[int]) -> NDArray[np.float32]:
    count = len(prompt)
    inputs = StepInputs(
        token_ids=np.array(prompt, np.int32),
        positions=np.arange(count, dtype=np.int32),
        query_starts=np.array([0, count], np.int32),
        context_lengths=np.array([count], np.int32),
        block_tables=np.arange(-(-count // 16), dtype=np.int32)[None],
        samples=[],
    )
    return backend.logits(inputs, range(count))
