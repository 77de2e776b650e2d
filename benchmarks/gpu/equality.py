"""Models of both backends over the same weights: the same tokens, and nearly the same logits."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu.models import int4_matrix, on_cuda, on_torch, random_weights
from benchmarks.gpu.report import Row
from benchmarks.gpu.runs import generate
from benchmarks.gpu.setting import Setting
from services.executor.backends.base import Backend, SamplingRule, StepInputs
from services.executor.backends.cuda.backend import DTYPES, StepSizes
from services.executor.backends.torch_parameters import LayerWeights, ModelWeights

SIZES = StepSizes(sequences=4, tokens=256)
LEAST_AGREEMENT = 0.95
"""Of most likely tokens in 16 bits: random models have many near ties."""


def equality(setting: Setting) -> Iterator[Row]:
    """Greedy and seeded tokens in fp32, plain and in 4 bits; in 16 bits, how often the likeliest token is the same."""
    spec, device = setting.small, setting.device
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

    rounded = _rounded(weights)
    ours = on_cuda(spec, weights, device, dtype="fp32", format_="int4", sizes=SIZES, blocks=blocks)
    theirs = on_torch(spec, rounded, device, dtype="fp32", blocks=blocks)
    found, expected = (generate(one, 16, prompts, steps, 64) for one in (ours, theirs))
    yield Row("greedy tokens equal, 4 bits in fp32", _share(found, expected), "", 1.0)

    weights = random_weights(spec, DTYPES[setting.dtype], setting.place)
    for format_ in ("plain", "int8", "fp8"):
        ours = on_cuda(spec, weights, device, dtype=setting.dtype, format_=format_, sizes=SIZES, blocks=blocks)
        theirs = on_torch(spec, weights, device, dtype=setting.dtype, blocks=blocks)
        same = (_logits(ours, prompts[0]).argmax(1) == _logits(theirs, prompts[0]).argmax(1)).mean()
        goal = LEAST_AGREEMENT if format_ == "plain" else None
        yield Row(f"likeliest tokens equal, {format_} in {setting.dtype}", float(same), "", goal)


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


def _rounded(weights: ModelWeights) -> ModelWeights:
    """The layers' matrices as 4 bits mean them."""

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        return int4_matrix(weight).weight.dequantize()

    layers = [
        LayerWeights(
            one.attention_norm, rounded(one.qkv), one.qkv_bias, rounded(one.o), one.o_bias,
            one.mlp_norm, rounded(one.gate_up), one.gate_up_bias, rounded(one.down), one.down_bias,
        )
        for one in weights.layers
    ]  # fmt: skip
    return ModelWeights(weights.embedding, layers, weights.final_norm, weights.head)
