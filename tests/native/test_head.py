"""What a step makes of its rows: argmax, draws and scores of many at once, equal logits, logits that are no number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kernels import _native
from services.executor.backends.base import SampleRow, SamplingRule, TokenScores
from services.executor.backends.cpu.samplers import sampler_of
from services.executor.sampling.scores import score
from tests.fixtures.models import make_rand_model
from tests.fixtures.vocabularies import byte_level
from tests.native import budgets
from tests.native.packed_models import SETS, PackedModel, pack_model
from tests.native.runs import Runs, ids_of

VOCABULARY = byte_level(["more"] * 41)  # 301 tokens: ten panels, the last one of 13 rows
POISON, LARGEST = 250, np.float32(3.3e38)
"""A token whose logits are NaN: a norm's gain makes infinity of its embedding."""


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    """Tokens 0 to 99 have the largest logits, and 100 to 199 and 200 to 299 the same, in other lanes and panels."""
    path: Path = make_rand_model(tmp_path_factory.mktemp("head") / "model", 7, vocabulary=VOCABULARY, layers=1)
    tensors = load_file(path / "model.safetensors")
    head = tensors["lm_head.weight"]
    head[:100] *= 2
    head[100:200] = head[:100]
    head[200:300] = head[:100]
    tensors["model.embed_tokens.weight"][POISON] = LARGEST
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return pack_model(path)


def step(
    runs: Runs, chunks: dict[int, list[int]], rows: list[int], samplers: list[_native.Sampler | None], scored: list
) -> tuple[list[int], list, list]:
    inputs = runs.inputs(chunks)
    positions = np.arange(len(rows), dtype=np.int32)
    tokens, row_scores, prompt_scores = runs.model.step(
        **inputs, rows=np.array(rows, np.int32), samplers=samplers, output_positions=positions, scored=scored
    )
    return tokens.tolist(), row_scores, prompt_scores


def check_scores(found: tuple, logits: list[np.ndarray], targets: list[int], count: int) -> None:
    scores, expected = TokenScores(*found), score(logits, targets, count)
    assert scores.chosen == pytest.approx(expected.chosen, abs=budgets.LOGPROB)
    assert (scores.ranks, scores.top_ids) == (expected.ranks, expected.top_ids)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_of_every_kind_in_any_order(packed: PackedModel, instruction_set: str, threads: int) -> None:
    chunks = {0: ids_of(1, 90, 250), 1: ids_of(2, 40, 250), 2: ids_of(3, 1, 250)}
    logits = np.concatenate([*Runs(packed, instruction_set=instruction_set).feed(chunks).values()])
    rng = np.random.default_rng(threads)
    rows = [*range(80), *rng.integers(0, 131, 70).tolist(), 130, 130, 5]  # more than one pass holds, some twice
    rules = [None, SamplingRule(temperature=0.0, logprob_count=4), SamplingRule(temperature=1.0, seed=3)]
    kinds = rng.integers(0, 3, len(rows)).tolist()
    samplers = [
        None if rule is None else sampler_of(SampleRow(0, rule, [], []), VOCABULARY.size)
        for rule in (rules[kind] for kind in kinds)
    ]
    targets = ids_of(4, 89, VOCABULARY.size)
    scored = [(0, np.array(targets, np.int32), 3), (129, np.array([7], np.int32), 0), (3, np.zeros(0, np.int32), 2)]
    runs = Runs(packed, instruction_set=instruction_set, threads=threads)
    tokens, row_scores, prompt_scores = step(runs, chunks, rows, samplers, scored)
    for i, (row, kind, token, scores) in enumerate(zip(rows, kinds, tokens, row_scores, strict=True)):
        if kind == 2:
            assert token == _native.sample_row(samplers[i], logits[row], i, instruction_set)
        else:
            assert token == int(logits[row].argmax()), "the lowest of equals"
        assert (scores is not None) == (kind == 1)
        if scores is not None:
            check_scores(scores, [logits[row]], [token], 4)
    check_scores(prompt_scores[0], list(logits[:89]), targets, 3)
    check_scores(prompt_scores[1], [logits[129]], [7], 0)
    assert prompt_scores[2] == ([], [], [], [])


@pytest.mark.parametrize("instruction_set", SETS)
def test_logits_that_are_no_number_are_no_token(packed: PackedModel, instruction_set: str) -> None:
    """And harm no other row."""
    runs, fine = Runs(packed, instruction_set=instruction_set, threads=2), ids_of(5, 20, 250)
    expected = Runs(packed, instruction_set=instruction_set).feed({0: fine})[0]
    chunks = {0: fine, 1: [POISON, 3, 4], 2: [1]}
    sampler = sampler_of(SampleRow(0, SamplingRule(seed=1, logprob_count=2), [], []), VOCABULARY.size)
    rows, samplers = [19, 20, 21, 22, 18], [None, None, sampler, sampler, None]
    tokens, row_scores, prompt_scores = step(runs, chunks, rows, samplers, [(20, np.array([3, 4], np.int32), 2)])
    assert tokens == [int(expected[19].argmax()), -1, -1, -1, int(expected[18].argmax())]
    assert row_scores == [None] * 5
    assert np.isnan(prompt_scores[0][0]).all()
    assert prompt_scores[0][1] == [1, 1]


@pytest.mark.parametrize("instruction_set", SETS)
def test_one_logit_that_is_no_number_is_seen(tmp_path: Path, instruction_set: str) -> None:
    """The products of one token's row overflow to both infinities, and no other's."""
    path = make_rand_model(tmp_path / "model", 8, vocabulary=VOCABULARY, layers=1)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"][42] = LARGEST
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    runs, chunks = Runs(pack_model(path), instruction_set=instruction_set), {0: ids_of(6, 9)}
    logits = runs.feed(chunks)[0]
    assert np.flatnonzero(~np.isfinite(logits).all(0)).tolist() == [42]
    bad = [row for row in range(9) if not logits[row, 42] < np.inf]
    assert bad
    runs.forget(0)
    tokens, _, _ = step(runs, chunks, bad, [None] * len(bad), [])
    assert tokens == [-1] * len(bad)
