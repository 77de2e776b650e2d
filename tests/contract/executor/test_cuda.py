"""The cuda backend beside the torch backend: small cases, one of each, interpreted where there is no GPU."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.v1.types_pb2 import POOLING_LAST, POOLING_MEAN, Constraint
from services.common.errors import QuireError
from services.executor.backends.base import StepInputs
from services.executor.batch import StepLimits
from services.executor.loader import LoadedModel, make_loader
from services.executor.settings import ExecutorSettings
from tests.fixtures.models import make_rand_model
from tests.fixtures.quantized import quantize_folder
from tests.triton_device import DEVICE
from tests.unit.executor.conftest import make_bench
from tests.unit.executor.plans import state, tokens_by_sequence
from tests.unit.executor.speculation.oracle import Oracle

COUNT = 3
PROMPTS = [[7, 3, 9, 12], [65, 66]]
ASKED = {
    "block_size": 16, "kv_blocks": 24, "threads": 1, "dtype": "fp32", "max_sequences": 4, "max_step_tokens": 64,
    "kv": "hot+warm+cold",
}  # fmt: skip


def load(path: Path, backend: str, **more: Any) -> LoadedModel:
    return make_loader(ExecutorSettings.model_validate(ASKED | more | {"backend": backend}))("rand", str(path))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_rand_model(tmp_path_factory.mktemp("rand"), 3, layers=1, context_length=128)


@pytest.fixture(scope="module")
def models(path: Path) -> tuple[LoadedModel, LoadedModel]:
    """torch's and ours; drafts may be verified in captured steps."""
    return load(path, "torch"), load(path, "cuda", kv="hot", draft="ngram")


def answers(model: LoadedModel, rule: dict[str, Any], oracle: Oracle | None = None, drafts: int = 0) -> list[list[int]]:
    bench = make_bench(StepLimits(sequences=4, tokens=64))
    bench.loop.backend, bench.loop.proposer = model.backend, oracle
    bench.core.set_model(model.limits, guides=model.grammars)
    if model.grammars is not None:
        bench.loop.masks = model.grammars.masks
    rule = dict(rule)
    regex = rule.pop("regex", None)
    entering = [state(i, prompt, [2 * i, 2 * i + 1], max_tokens=COUNT, **rule) for i, prompt in enumerate(PROMPTS)]
    for one in entering if regex else ():
        one.constraint.CopyFrom(Constraint(regex=regex))
    bench.take(enter=entering, grants=[(i, 4, 30, drafts) for i in range(len(PROMPTS))])
    sent, deadline = bench.run(), time.monotonic() + 60
    while bench.core.sequences and time.monotonic() < deadline:  # a grammar is being compiled
        time.sleep(0.001)
        sent += bench.run()
    found = tokens_by_sequence(sent)
    return [found[i] for i in range(len(PROMPTS))]


RULES: list[dict[str, Any]] = [
    {"ignore_eos": True},
    {"temperature": 0.8, "top_k": 9, "seed": -3, "frequency_penalty": 0.7, "ignore_eos": True},
    {"temperature": 1.0, "seed": 4, "min_tokens": 2, "stop_ids": range(0, 256, 3), "logit_bias": {17: 3.0}},
    {"temperature": 1.0, "seed": 11, "regex": "[a-f]{2,9}"},
]


@pytest.mark.parametrize("rule", RULES, ids=["greedy", "penalties", "bans", "grammar"])
def test_texts_are_torch_s_with_drafts_and_without(models, rule: dict[str, Any]) -> None:
    theirs, ours = models
    expected = answers(theirs, rule)
    assert answers(ours, rule) == expected
    texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, expected, strict=True)]

    def truth(tokens: list[int]) -> int:
        text = next(text for text, prompt in zip(texts, PROMPTS, strict=True) if tokens[: len(prompt)] == prompt)
        return text[len(tokens)] if len(tokens) < len(text) else 1

    assert answers(ours, rule, Oracle(truth, 0.7, 256), 2) == expected


def logits(model: LoadedModel, tokens: list[int]) -> np.ndarray:
    inputs = StepInputs(
        token_ids=np.array(tokens, np.int32),
        positions=np.arange(len(tokens), dtype=np.int32),
        query_starts=np.array([0, len(tokens)], np.int32),
        context_lengths=np.array([len(tokens)], np.int32),
        block_tables=np.array([[3, 1]], np.int32),
        samples=[],
    )
    return model.backend.logits(inputs, range(len(tokens)))


def vectors(model: LoadedModel) -> dict[int, list[float]]:
    """Of both prompts, computed beside each other: the mean of one, the last state of the other."""
    bench = make_bench(StepLimits(sequences=4, tokens=64))
    bench.loop.backend = model.backend
    bench.core.set_model(model.limits)
    entering = [state(i, prompt, [2 * i, 2 * i + 1], max_tokens=1) for i, prompt in enumerate(PROMPTS)]
    entering[0].pooling, entering[1].pooling = POOLING_MEAN, POOLING_LAST
    bench.take(enter=entering, grants=[(0, 3, 2), (1, 1, 2)])
    return {one.sequence_id: list(one.values) for message in bench.run() for one in message.embeddings}


def test_vectors_are_torch_s(models) -> None:
    expected, found = map(vectors, models)
    assert expected.keys() == found.keys() == {0, 1}
    for number, values in expected.items():
        assert np.allclose(found[number], values, atol=1e-5)


TOLERANCES = {
    "gptq-4-ordered": 1e-3, "awq": 1e-3, "packed-4-asymmetric": 1e-3, "fp8-blocks": 1e-3, "int8": 0.15, "float8": 0.3,
}  # fmt: skip
"""Of the spread of logits: the last two round activations as well."""


@pytest.mark.parametrize("scheme", TOLERANCES)
def test_quantized_weights_are_those_of_the_file(path: Path, tmp_path: Path, scheme: str) -> None:
    plain = Path(shutil.copytree(path, tmp_path / "m"))
    quantized, same = quantize_folder(plain, scheme)
    ours = load(quantized, "cuda", kv="hot")
    kinds = {"int8": "int8", "float8": "fp8", "fp8-blocks": "fp32"}
    assert ours.backend.dtype.split("+")[0] in (kinds.get(scheme, "int4"), "fp32")
    assert kinds.get(scheme, "int4") in ours.backend.dtype
    tokens = [7, 3, 9, 12, 200]
    expected = logits(load(same, "torch", kv="hot"), tokens)
    error = np.abs(logits(ours, tokens) - expected).max() / expected.std()
    assert error < TOLERANCES[scheme]


def test_fp16_is_near(path: Path, models) -> None:
    ours = load(path, "cuda", dtype="fp16", kv="hot")
    assert (ours.backend.dtype, ours.backend.kv_format) == ("fp16", "fp16")
    expected = logits(models[0], [7, 3, 9])
    assert np.abs(logits(ours, [7, 3, 9]) - expected).max() / expected.std() < 0.02


def test_colder_copies_are_torch_s_bit_for_bit(path: Path) -> None:
    theirs, ours = load(path, "torch"), load(path, "cuda")
    starts = ours.shape.pool_starts
    assert starts == theirs.shape.pool_starts
    hot = np.random.default_rng(2).standard_normal(ours.shape.block_bytes // 4).astype(np.float32)
    warm, cold = starts[1] + 3, starts[2] + 5
    found = []
    for model in (theirs, ours):
        model.backend.write_block(2, memoryview(hot.view(np.uint8)))
        model.backend.copy_blocks([(2, 4), (4, 5)])
        model.backend.demote_blocks([(5, warm), (warm, cold), (2, warm + 1)])
        found.append([bytes(model.backend.read_block(block)) for block in (5, warm, cold, warm + 1)])
    assert found[0] == found[1]
    assert found[0][0] == hot.tobytes()


def test_deterministic_texts_are_the_same_alone(path: Path, models) -> None:
    ours = load(path, "cuda", kv="hot", deterministic=True)
    assert "cut at" in ours.backend.numerics
    assert answers(ours, RULES[0]) == answers(models[0], RULES[0])


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a card multiplies bf16")
@pytest.mark.parametrize("wish", [{"dtype": "bf16"}, {"kv_format": "bf16"}, {"instruction_set": "avx2"}])
def test_what_it_cannot_do_is_refused_by_name(path: Path, wish: dict[str, str]) -> None:
    with pytest.raises(QuireError, match=f"the cuda backend cannot serve this: {next(iter(wish))}: "):
        load(path, "cuda", **wish)


def test_torch_promises_no_determinism(path: Path) -> None:
    with pytest.raises(QuireError, match="deterministic"):
        load(path, "torch", deterministic=True)


def test_formats_are_named_and_widening_is_told(path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quantized, _ = quantize_folder(Path(shutil.copytree(path, tmp_path / "m")), "gptq-3")
    with caplog.at_level(logging.WARNING, "quire.executor"):
        ours = load(quantized, "cuda", kv="hot")
    assert ours.backend.dtype == "fp32"
    assert "widened" in caplog.text
