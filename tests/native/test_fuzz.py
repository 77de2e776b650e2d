"""Random plans on the native backend and on torch: the same tokens, the same scores."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from services.executor.backends.base import KvShape, StepInputs, TokenScores
from services.executor.backends.cpu.backend import CpuBackend
from services.executor.backends.torch_backend import TorchBackend
from services.executor.models.checkpoint import open_checkpoint
from services.executor.sampling.draw import draw, single_rows
from tests.fixtures.models import make_rand_model
from tests.native import budgets
from tests.native.packed_models import SETS
from tests.native.random_plans import BLOCK, RandomPlans

BLOCKS = 24
STEPS = 60


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_rand_model(tmp_path_factory.mktemp("fuzz") / "model", 9, context_length=256)


@pytest.fixture(scope="module")
def truth(path: Path) -> TorchBackend:
    backend = TorchBackend.load(open_checkpoint(path), dtype="fp32", threads=1, context_length=None, device="cpu")
    backend.allocate_kv(KvShape(BLOCK, backend.kv_block_bytes(BLOCK), BLOCKS))
    return backend


def load(path: Path, instruction_set: str, threads: int) -> CpuBackend:
    backend = CpuBackend.load(open_checkpoint(path), instruction_set=instruction_set, threads=threads)
    backend.allocate_kv(KvShape(BLOCK, backend.kv_block_bytes(BLOCK), BLOCKS))
    return backend


def check_scores(found: TokenScores | None, expected: TokenScores | None) -> None:
    if found is None or expected is None:
        assert found is expected
        return
    assert found.chosen == pytest.approx(expected.chosen, abs=budgets.LOGPROB)
    assert [len(ids) for ids in found.top_ids] == [len(ids) for ids in expected.top_ids]
    some, others = (list(chain.from_iterable(scores.top_logprobs)) for scores in (found, expected))
    assert some == pytest.approx(others, abs=budgets.LOGPROB)


def check_tie(inputs: StepInputs, at: int, native: CpuBackend, truth: TorchBackend, drawn: list[int]) -> None:
    """Two tokens differ where the logits are as close as they must be and the rules draw each from its own."""
    row = single_rows(inputs.samples)[at]
    logits = [backend.logits(inputs, [row.row])[0] for backend in (native, truth)]
    assert float(np.abs(logits[0] - logits[1]).max()) < budgets.LOGIT
    assert drawn == draw(logits, [row, row])


def check(inputs: StepInputs, native: CpuBackend, truth: TorchBackend) -> tuple[list[int], int]:
    """Runs a step on both; the tokens of torch, and how many of native code's differ."""
    found, expected = native.step(inputs), truth.step(inputs)
    ties = 0
    for at, (one, other) in enumerate(zip(found.sampled, expected.sampled, strict=True)):
        assert one is not None
        assert other is not None
        if one.token_id == other.token_id:
            check_scores(one.scores, other.scores)
        else:
            check_tie(inputs, at, native, truth, [one.token_id, other.token_id])
            ties += 1
    for scores in zip(found.prompt_scores, expected.prompt_scores, strict=True):
        check_scores(*scores)
    return [other.token_id for other in expected.sampled if other is not None], ties


def play(path: Path, truth: TorchBackend, instruction_set: str, seed: int) -> None:
    random = Random(seed)
    native = load(path, instruction_set, threads=random.randint(1, 3))

    def copy(pairs: list[tuple[int, int]]) -> None:
        native.copy_blocks(pairs)
        truth.copy_blocks(pairs)

    plans = RandomPlans(random, native.spec.vocab_size, BLOCKS, copy)
    ties = 0
    for _ in range(STEPS):
        step = plans.next_step()
        tokens, different = check(step.inputs, native, truth)
        ties += different
        plans.finish(step, tokens)
    assert ties <= 1 + plans.seen["tokens"] // 50
    assert all(plans.seen[name] for name in ("tokens", "accepted", "preempted", "resumed", "shared", "copied")), (
        plans.seen
    )


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("seed", range(2))
def test_plans(path: Path, truth: TorchBackend, instruction_set: str, seed: int) -> None:
    play(path, truth, instruction_set, seed)


@pytest.mark.full
@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_plans(path: Path, truth: TorchBackend, instruction_set: str, seed: int) -> None:
    play(path, truth, instruction_set, seed)
