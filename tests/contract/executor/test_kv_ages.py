"""Formats by age with each backend: the same output whatever the chunks, the neighbours and the prefix found."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from services.common.kv_policy import KvPolicy
from services.executor.batch import StepLimits
from services.executor.loader import LoadedModel, make_loader
from services.executor.settings import ExecutorSettings
from tests.fixtures.models import make_rand_model
from tests.unit.executor.aged import Ages
from tests.unit.executor.conftest import Bench, make_bench
from tests.unit.executor.plans import state

COUNT = 12
PROMPT = 500
TOKENS = PROMPT + COUNT
ASKED = {
    "block_size": 32,
    "kv_blocks": 120,
    "threads": 1,
    "kv": "hot+warm+cold",
    "kv_hot_tokens": 64,
    "kv_warm_tokens": 200,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    torch.set_num_threads(1)
    return make_rand_model(tmp_path_factory.mktemp("rand"), 5, context_length=640, heads=4, kv_heads=2, head_size=32)


@pytest.fixture(scope="module", params=["torch", "cpu"])
def model(path, request) -> LoadedModel:
    settings = ExecutorSettings.model_validate(ASKED | {"backend": request.param, "dtype": "fp32"})
    return make_loader(settings)("rand", str(path))


@pytest.fixture
def bench(model) -> Bench:
    made = make_bench(StepLimits(sequences=8, tokens=640))
    made.loop.backend = model.backend
    made.core.set_model(model.limits)
    return made


@pytest.fixture
def ages(model) -> Ages:
    return Ages(model.limits, model.policy)


def prompt_of(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(count)]


def entering(number: int, prompt: list[int], table: list[int], computed: int = 0):
    return state(number, prompt, table, computed=computed, max_tokens=COUNT, ignore_eos=True, logprobs=3)


def scores(messages, number: int) -> list[float]:
    """Log probabilities of a sequence's output and its alternatives: equal where all logits are."""
    parts = [part for message in messages for part in message.logprobs if part.sequence_id == number]
    found = [value for part in parts for value in (*part.output.chosen, *part.output.top_logprobs)]
    assert len(found) == 4 * COUNT
    return sorted(found)


def alone(bench: Bench, ages: Ages, limit: int) -> list[float]:
    bench.take(
        enter=[entering(1, prompt_of(1, PROMPT), ages.hot(TOKENS))],
        grants=[(1, limit, 100)],
        demotions=ages.demotions(1, 0, TOKENS),
    )
    return scores(bench.run(), 1)


@pytest.fixture(scope="module")
def whole(model) -> list[float]:
    made = make_bench(StepLimits(sequences=8, tokens=640))
    made.loop.backend = model.backend
    made.core.set_model(model.limits)
    return alone(made, Ages(model.limits, model.policy), 640)


def test_older_blocks_are_read_in_fewer_bits(bench, model, whole):
    hot = alone(bench, Ages(model.limits, KvPolicy()), 640)
    assert hot != whole
    assert max(abs(a - b) for a, b in zip(hot, whole, strict=True)) < 1.0


@pytest.mark.parametrize("limit", [16, 64, 100])
def test_chunks_change_nothing(bench, ages, whole, limit):
    assert alone(bench, ages, limit) == whole


def test_neighbours_change_nothing(bench, ages, whole):
    others = {i: prompt_of(i, 130 * (i - 1)) for i in (2, 3, 4)}
    bench.take(
        enter=[entering(i, prompt, ages.hot(len(prompt) + COUNT)) for i, prompt in others.items()],
        grants=[(i, 90, 100) for i in others],
        demotions=[one for i, prompt in others.items() for one in ages.demotions(i, 0, len(prompt) + COUNT)],
    )
    bench.run(3)
    bench.take(
        enter=[entering(1, prompt_of(1, PROMPT), ages.hot(TOKENS))],
        grants=[(1, 70, 100)],
        demotions=ages.demotions(1, 0, TOKENS),
    )
    assert scores(bench.run(), 1) == whole


@pytest.mark.parametrize("computed", [128, 384, 448])
def test_a_found_prefix_changes_nothing(bench, ages, whole, computed):
    """Found hot, or as another sequence left it: both become what the length prescribes."""
    prompt, table = prompt_of(1, PROMPT), ages.hot(TOKENS)
    made = ages.demotions(1, 0, computed)
    bench.take(enter=[entering(1, prompt[:computed], table)], grants=[(1, 640, 100)], demotions=made)
    bench.run()
    left = list(table)
    for one in made:
        left[one.positions[0]] = one.block_ids[0]
    for number, found, changes in ((2, table, ages.at_entry(2, computed)), (3, left, [])):
        own = ages.hot(TOKENS - computed)
        bench.take(
            enter=[entering(number, prompt, found[: computed // 32] + own, computed)],
            grants=[(number, 640, 100)],
            demotions=[*changes, *ages.demotions(number, computed, TOKENS)],
        )
        assert scores(bench.run(), number) == whole


def prompt_scores(model: LoadedModel, policy: KvPolicy) -> np.ndarray:
    """Log probabilities of a prompt's tokens, in order."""
    bench = make_bench(StepLimits(sequences=8, tokens=640))
    bench.loop.backend = model.backend
    bench.core.set_model(model.limits)
    ages = Ages(model.limits, policy)
    bench.take(
        enter=[state(1, prompt_of(1, PROMPT), ages.hot(PROMPT + 1), max_tokens=1, prompt_logprobs=0)],
        grants=[(1, 640, 100)],
        demotions=ages.demotions(1, 0, PROMPT),
    )
    found = np.concatenate([part.prompt.chosen for message in bench.run() for part in message.logprobs])
    assert len(found) == PROMPT - 1
    return found


def scaled(model: LoadedModel, path: Path, folder: Path, factor: float) -> LoadedModel:
    """The same model, were nothing rounded: its keys and values are `factor` times as large, what they meet smaller."""
    other = Path(shutil.copytree(path, folder / "scaled"))
    tensors = load_file(other / "model.safetensors")
    for name in tensors:
        if "k_proj" in name or "v_proj" in name:
            tensors[name] *= np.float32(factor)
        if "q_proj" in name or "o_proj" in name:
            tensors[name] /= np.float32(factor)
    save_file(tensors, other / "model.safetensors")
    settings = ExecutorSettings.model_validate(ASKED | {"backend": model.backend.name, "dtype": "fp32"})
    return make_loader(settings)("scaled", str(other))


@pytest.mark.parametrize("factor", [2.0**10, 2.0**22, 2.0**-22])
def test_scales_follow_the_numbers(path, model, tmp_path, factor):
    """Powers of two change exponents alone, also of scales and minima: fp16 would hold none of the latter two."""
    found = prompt_scores(scaled(model, path, tmp_path, factor), model.policy)
    np.testing.assert_array_equal(found, prompt_scores(model, model.policy))


def test_keys_a_thousand_times_as_large(path, model, tmp_path):
    """No further from fp32 blocks than keys of usual size are; a scale taken as 1 is ten times as far."""
    large = scaled(model, path, tmp_path, 1000.0)
    exact, rounded = (prompt_scores(model, policy) for policy in (KvPolicy(), model.policy))
    large_exact, large_rounded = (prompt_scores(large, policy) for policy in (KvPolicy(), large.policy))
    np.testing.assert_allclose(large_exact, exact, atol=1e-3)
    usual = float(np.abs(rounded - exact).mean())
    assert usual < 0.2
    assert 0 < float(np.abs(large_rounded - large_exact).mean()) < 1.2 * usual
