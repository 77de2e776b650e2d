"""Speculation over real backends: whatever is drafted, by whom and how far, the answer is that of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from services.executor.batch import StepLimits
from services.executor.loader import LoadedModel, make_loader
from services.executor.settings import ExecutorSettings
from services.executor.speculation.early_exit import EarlyExitProposer
from services.executor.speculation.ngram import NgramProposer
from services.executor.speculation.proposer import Proposer
from services.executor.warmup import warm_up
from tests.fixtures.models import make_rand_model
from tests.unit.executor.conftest import make_bench
from tests.unit.executor.plans import ends, state, tokens_by_sequence
from tests.unit.executor.speculation.oracle import Oracle

BLOCK_SIZES = {"torch": 4, "cpu": 32}
LENGTH = 18
RULES: list[dict[str, Any]] = [
    {},
    {"logprobs": 3},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"repetition_penalty": 1.1, "logit_bias": {17: 3.0, 200: 4.0}},
    {"min_tokens": 9, "stop_ids": range(0, 256, 3)},
    {"stop_ids": range(0, 256, 7)},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "top_k": 9, "seed": -3, "logprobs": 1},
    {"temperature": 1.2, "top_p": 0.8, "min_p": 0.02, "seed": 11, "repetition_penalty": 1.2},
]


@dataclass
class Answer:
    """What a client could see of a sequence."""

    token_ids: list[int]
    reason: int
    stop_token: int
    logprobs: list[float]
    alternatives: list[int]


@pytest.fixture(scope="module", params=BLOCK_SIZES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)
    path = make_rand_model(tmp_path_factory.mktemp("rand"), 3)
    asked = {"backend": request.param, "block_size": BLOCK_SIZES[request.param], "kv_blocks": 120, "draft": "none"}
    loaded = make_loader(ExecutorSettings.model_validate(asked | {"dtype": "fp32", "threads": 1}))("rand", str(path))
    warm_up(loaded.backend, loaded.shape, 64, loaded.backend.spec.context_length)
    return loaded


def prompts_of(count: int, seed: int = 1) -> list[list[int]]:
    """Some of them repeat themselves."""
    draw = random.Random(seed)
    prompts = []
    for i in range(count):
        part = [draw.randrange(256) for _ in range(draw.randrange(2, 12))]
        prompts.append(part * (1 + i % 3))
    return prompts


def answers(
    model: LoadedModel,
    prompts: list[list[int]],
    rule: dict[str, Any],
    proposer: Proposer | None = None,
    drafts: int | list[int] = 0,
    *,
    together: int = 8,
    chunk: int = 64,
) -> tuple[list[Answer], int, int]:
    """Each prompt's answer, the drafts proposed and accepted. `drafts`: the limit, or one for each step in turn."""
    found: list[Answer] = []
    proposed = accepted = 0
    for first in range(0, len(prompts), together):
        bench = make_bench(StepLimits(sequences=8, tokens=80))
        bench.loop.backend, bench.loop.proposer = model.backend, proposer
        bench.core.set_model(model.limits)
        some = prompts[first : first + together]
        entering = [
            state(i, prompt, range(15 * i, 15 * i + 15), max_tokens=LENGTH, ignore_eos=True, **rule)
            for i, prompt in enumerate(some)
        ]
        limits = [drafts] * LENGTH if isinstance(drafts, int) else drafts
        grants = [(i, chunk, -(-len(prompt) // chunk)) for i, prompt in enumerate(some)]
        grants += [(i, 1, 1, limit) for limit in limits for i in range(len(some))]
        bench.take(enter=entering, grants=grants)
        sent = bench.run()
        proposed += sum(sum(message.proposed_counts) for message in sent)
        accepted += sum(sum(message.accepted_counts) for message in sent)
        tokens, ended = tokens_by_sequence(sent), ends(sent)
        for i in range(len(some)):
            scores = [part.output for message in sent for part in message.logprobs if part.sequence_id == i]
            found.append(
                Answer(
                    tokens[i],
                    ended[i].reason,
                    ended[i].stop_token_id,
                    [value for part in scores for value in part.chosen],
                    [token for part in scores for token in part.top_token_ids],
                )
            )
    return found, proposed, accepted


def oracle(prompts: list[list[int]], plain: list[Answer], accuracy: float) -> Oracle:
    """Knows the plain answers; of what no answer holds, it says anything."""
    whole = {tuple(prompt): [*prompt, *answer.token_ids] for prompt, answer in zip(prompts, plain, strict=True)}

    def truth(tokens: list[int]) -> int:
        text = next(text for prompt, text in whole.items() if tuple(tokens[: len(prompt)]) == prompt)
        return text[len(tokens)] if len(tokens) < len(text) else 1

    return Oracle(truth, accuracy, 256)


def proposers(model: LoadedModel, prompts: list[list[int]], plain: list[Answer]) -> Iterator[Proposer]:
    yield NgramProposer(model.backend, margin=0.0)  # random text repeats itself too seldom for drafts to pay
    yield EarlyExitProposer(model.backend, 1)
    for accuracy in (0.5, 0.9, 1.0):
        yield oracle(prompts, plain, accuracy)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_g2_g5_answers_are_those_of_plain_decoding(model: LoadedModel, rule: dict[str, Any]) -> None:
    prompts = prompts_of(6)
    plain, _, _ = answers(model, prompts, rule)
    for proposer in proposers(model, prompts, plain):
        for drafts, together, chunk in ((1, 8, 64), (7, 3, 5)):
            found, proposed, accepted = answers(model, prompts, rule, proposer, drafts, together=together, chunk=chunk)
            assert found == plain
            assert proposed > 0
            if isinstance(proposer, Oracle) and proposer._accuracy == 1.0:
                assert accepted > 0.6 * sum(len(answer.token_ids) - 1 for answer in plain) * drafts / (drafts + 1)


def test_g7_limits_that_change_at_each_step_change_nothing(model: LoadedModel) -> None:
    prompts, rule = prompts_of(6), RULES[8]
    plain, _, _ = answers(model, prompts, rule)
    draw = random.Random(3)
    for proposer in proposers(model, prompts, plain):
        limits = [draw.choice([0, 0, 1, 3, 8]) for _ in range(LENGTH)]
        assert answers(model, prompts, rule, proposer, limits)[0] == plain


def test_the_whole_model_as_an_early_exit_is_always_right(model: LoadedModel) -> None:
    """Greedy or not: the draft draws with the noise of the target."""
    for rule in (RULES[0], RULES[2], RULES[8]):
        proposer = EarlyExitProposer(model.backend, 1)
        proposer.layers = model.backend.spec.layer_count
        plain, _, _ = answers(model, prompts_of(5), rule)
        found, proposed, accepted = answers(model, prompts_of(5), rule, proposer, 5)
        assert found == plain
        assert proposed == accepted > 0


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("drafts", range(1, 9))
@pytest.mark.parametrize("together", [1, 8])
def test_g2_fifty_prompts(model: LoadedModel, rule: dict[str, Any], drafts: int, together: int) -> None:
    prompts = prompts_of(50, seed=7)
    plain, _, _ = answers(model, prompts, rule)
    for proposer in proposers(model, prompts, plain):
        assert answers(model, prompts, rule, proposer, drafts, together=together)[0] == plain
