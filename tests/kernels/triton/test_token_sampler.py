"""The GPU's sampler against the rules of draw.py and scores.py, which every backend's sampler is held to."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.token_sampler import SamplingState, accept_drafts, count_tokens, draw_tokens, score_tokens
from services.executor.backends.base import SampleRow, SamplingRule
from services.executor.sampling.draw import draw, is_greedy
from services.executor.sampling.scores import score

RULES = [
    SamplingRule(temperature=0.0),
    SamplingRule(temperature=1.0, seed=5),
    SamplingRule(temperature=0.7, top_k=5, seed=-3, choice=2),
    SamplingRule(temperature=1.3, top_p=0.6, seed=1 << 40),
    SamplingRule(temperature=2.0, top_k=40, top_p=0.9, min_p=0.02, seed=9),
    SamplingRule(temperature=0.9, min_p=0.2, seed=11),
    SamplingRule(temperature=0.9, top_k=1),
    SamplingRule(temperature=0.9, top_p=0.0),
    SamplingRule(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, seed=2),
    SamplingRule(temperature=0.0, logit_bias={3: 9.5, 7: -100.0, 11: 9.75}),
    SamplingRule(temperature=0.5, logit_bias={4: 2.0}, min_tokens=9, banned_until_min_tokens=(0, 1, 2), seed=4),
]


def state_of(rows: list[SampleRow], vocabulary: int, device: torch.device) -> SamplingState:
    rules = [row.rule for row in rows]

    def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    counts = torch.zeros(len(rows), vocabulary, dtype=torch.int32)
    changes = []
    for i, row in enumerate(rows):
        counts[i, list(row.prompt_ids)] = 1
        for token in row.output_ids:
            counts[i, token] += 2
        change = dict(row.rule.logit_bias)
        if len(row.output_ids) < row.rule.min_tokens:
            change |= dict.fromkeys(row.rule.banned_until_min_tokens, -math.inf)
        changes.append([*change.items(), *[(-1, 0.0)] * (8 - len(change))])
    return SamplingState(
        temperature=column([rule.temperature for rule in rules], torch.float32),
        top_k=column([rule.top_k for rule in rules], torch.int32),
        top_p=column([rule.top_p for rule in rules], torch.float64),
        min_p_floor=column([math.log(rule.min_p) if rule.min_p else -math.inf for rule in rules], torch.float32),
        repetition=column([rule.repetition_penalty for rule in rules], torch.float32),
        presence=column([rule.presence_penalty for rule in rules], torch.float64),
        frequency=column([rule.frequency_penalty for rule in rules], torch.float64),
        seeds=column([rule.seed for rule in rules], torch.int64),
        choices=column([rule.choice for rule in rules], torch.int32),
        positions=column([len(row.output_ids) for row in rows], torch.int32),
        slots=column([i if row.prompt_ids else -1 for i, row in enumerate(rows)], torch.int32),
        counts=counts.to(device),
        change_ids=column([[token for token, _ in change] for change in changes], torch.int32),  # type: ignore[arg-type]
        change_values=column([[value for _, value in change] for change in changes], torch.float32),  # type: ignore[arg-type]
    )


def logits_of(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(rows, vocabulary, generator=generator) * 3
    found[:, 5] = found[:, 6]  # equal ones
    return found


@pytest.mark.parametrize("vocabulary", [19, 1100])
def test_draws_what_the_reference_draws(vocabulary: int, device: torch.device) -> None:
    rows = [SampleRow(0, rule, [2, 3, 3], [4, 4, 5][: i % 4]) for i, rule in enumerate(RULES)]
    logits = logits_of(len(rows), vocabulary)
    found = draw_tokens(logits.to(device), state_of(rows, vocabulary, device)).tolist()
    assert found == draw(list(logits.numpy()), rows)
    assert len({row.rule.seed for row in rows if not is_greedy(row.rule)}) > 5


def test_only_what_masks_allow(device: torch.device) -> None:
    vocabulary = 70
    rows = [SampleRow(0, RULES[1], [], []), SampleRow(0, RULES[0], [], []), SampleRow(0, RULES[4], [], [])]
    logits = logits_of(3, vocabulary)
    allowed = torch.zeros(3, 96, dtype=torch.bool)
    allowed[0, 33], allowed[1, [31, 64, 2]] = True, True
    words = (allowed.view(3, 3, 32) * (1 << torch.arange(32))).sum(2)
    masks = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    state = replace(state_of(rows, vocabulary, device), masks=masks.to(device))
    for row, allows in zip(rows, masks.numpy().view(np.uint32), strict=True):
        row.allowed = allows
    found = draw_tokens(logits.to(device), state).tolist()
    assert found == draw(list(logits.numpy()), rows)
    assert found[0] == 33
    assert found[2] == -1


def test_drafts_count_as_output(device: torch.device) -> None:
    rule = SamplingRule(temperature=0.0, frequency_penalty=50.0, repetition_penalty=1.1)
    logits = logits_of(1, 40).expand(3, -1).contiguous()
    outputs = [[7], [7, 7], [7, 7, int(logits[0].argmax())]]
    rows = [SampleRow(0, rule, [1], output) for output in outputs]
    state = state_of([SampleRow(0, rule, [1], [7])] * 3, 40, device)
    drafts = [[-1, -1], [7, -1], [7, outputs[2][2]]]
    state = replace(state, drafts=torch.tensor(drafts, dtype=torch.int32, device=device))
    assert draw_tokens(logits.to(device), state).tolist() == draw(list(logits.numpy()), rows)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # NumPy's, under the interpreter
def test_rows_that_cannot_be_drawn(device: torch.device) -> None:
    logits = logits_of(4, 50)
    logits[0, 3], logits[1, 4], logits[2] = math.nan, math.inf, -math.inf
    rows = [SampleRow(0, RULES[i % 2], [], []) for i in range(4)]
    found = draw_tokens(logits.to(device), state_of(rows, 50, device)).tolist()
    assert found[:3] == [-1, -1, -1]
    assert found[3:] == draw([logits[3].numpy()], rows[3:])


@pytest.mark.parametrize("count", [0, 4])
def test_scores(count: int, device: torch.device) -> None:
    logits = logits_of(3, 4200)
    logits[1, :4190] = -math.inf
    logits[2] *= 4
    targets = [6, 4195, int(logits[2].argmin())]
    found = score_tokens(logits.to(device), torch.tensor(targets, dtype=torch.int32, device=device), count)
    expected = score(list(logits.numpy()), targets, count)
    np.testing.assert_allclose(found.chosen.cpu(), expected.chosen, atol=1e-5, rtol=1e-6)
    assert found.ranks.tolist() == expected.ranks
    assert found.top_ids.tolist() == expected.top_ids
    np.testing.assert_allclose(found.top_logprobs.cpu(), np.array(expected.top_logprobs), atol=1e-5, rtol=1e-6)


def test_scores_of_what_is_not_finite(device: torch.device) -> None:
    logits = logits_of(2, 30)
    logits[0, 2] = math.nan
    found = score_tokens(logits.to(device), torch.tensor([1, 1], dtype=torch.int32, device=device), 2)
    assert bool(found.chosen[0].isnan())
    assert bool(found.top_logprobs[0].isnan().all())
    assert bool(found.chosen[1].isfinite())


def test_drafts_hold_until_the_first_that_differs(device: torch.device) -> None:
    drawn = [[4, 5, 6], [4, 9, 6], [8], [3, 5, 7, 7], [-1, 5]]
    drafts = [[4, 5], [4, 5], [], [1, 5, 7], [2]]
    starts = np.cumsum([0, *map(len, drawn)])
    padded = torch.tensor([[*row, *[4] * (3 - len(row))] for row in drafts], dtype=torch.int32)
    held, following = accept_drafts(
        torch.tensor([token for row in drawn for token in row], dtype=torch.int32, device=device), padded.to(device),
        torch.tensor(starts, dtype=torch.int32, device=device),
    )  # fmt: skip
    assert held.tolist() == [2, 1, 0, 0, 0]
    assert following.tolist() == [6, 9, 8, 3, -1]


def test_output_is_counted(device: torch.device) -> None:
    counts = torch.zeros(3, 10, dtype=torch.int32)
    counts[2, 4] = 1
    found = counts.to(device)
    tokens = torch.tensor([[4, 4, 1], [2, 7, 7], [5, 5, 5]], dtype=torch.int32, device=device)
    count_tokens(
        found, torch.tensor([2, 0, -1], dtype=torch.int32, device=device), tokens,
        torch.tensor([3, 2, 3], dtype=torch.int32, device=device),
    )  # fmt: skip
    counts[2, 4], counts[2, 1], counts[0, 2], counts[0, 7] = 5, 2, 2, 2
    assert torch.equal(found.cpu(), counts)


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    logits = logits_of(1, 20).to(device)
    state = state_of([SampleRow(0, RULES[1], [], [])], 20, device)
    with pytest.raises(ValueError, match="top_k"):
        draw_tokens(logits, replace(state, top_k=state.top_k.long()))
    with pytest.raises(ValueError, match="counts are"):
        draw_tokens(logits[:, :10].contiguous(), state)
    with pytest.raises(ValueError, match="fp32"):
        draw_tokens(logits.double(), state)
