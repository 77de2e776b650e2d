"""The sampler: rules and their order, edges, log probabilities, and independence from neighbours."""

import math

import numpy as np
import pytest
import torch

from services.executor.backends.base import SampleRow, SamplingRule
from services.executor.sampling.scores import LEAST_LOGPROB
from services.executor.sampling.torch_sampler import sample, score_prompt

VOCAB = 97
torch.set_num_threads(1)


def logits_of(rows, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (rows, VOCAB)).astype(np.float32))


def row(at=0, prompt=(1, 2), output=(), **rule):
    return SampleRow(at, SamplingRule(**rule), list(prompt), list(output))


def draw(logits, *rows):
    return [None if drawn is None else drawn.token_id for drawn in sample(logits, rows)]


def draws(logits, count, **rule):
    """`count` draws from one distribution [V], one per output position."""
    rows = [row(output=[0] * position, **rule) for position in range(count)]
    return np.array(draw(logits.expand(count, -1).contiguous(), *rows))


def test_greedy_ties_go_to_the_lowest_id():
    logits = torch.zeros(2, VOCAB)
    logits[0, [40, 7]] = 5.0
    biased = row(temperature=0.0, logit_bias={90: 5.0, 11: 5.0})
    assert draw(logits, row(temperature=0.0), biased) == [7, 11]


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-4, 1e-2])
def test_b3_tiny_temperatures_are_greedy_and_leave_neighbours_alone(temperature):
    logits = logits_of(3)
    best = logits.argmax(1).tolist()
    rule = {"temperature": temperature, "logit_bias": {best[0]: -100.0}, "seed": 3}
    second = logits[0].topk(2).indices[1].item()
    neighbours = [row(temperature=0.0), row(temperature=1.0, seed=5)]
    alone = draw(logits[1:], *neighbours)
    assert draw(logits[:1], row(**rule)) == [second]
    assert draw(logits, row(**rule), *neighbours) == [second, *alone]


def test_b3_tiny_temperature_does_not_overflow_on_huge_logits():
    logits = logits_of(1) * 1e30
    assert draw(logits, row(temperature=2e-5)) == logits.argmax(1).tolist()


@pytest.mark.parametrize("top_p", [0.0, 1e-9, 1.0])
@pytest.mark.parametrize("top_k", [-1, 0, 1, VOCAB, 10**7])
def test_b5_edges_of_top_k_and_top_p(top_k, top_p):
    logits = logits_of(2)
    drawn = draw(logits, row(top_k=top_k, top_p=top_p, seed=11), row(temperature=0.0))
    if top_k == 1 or top_p < 1.0:
        assert drawn[0] == logits[0].argmax().item()
    else:
        assert drawn[0] == draw(logits[:1], row(seed=11))[0]
    assert drawn[1] == logits[1].argmax().item()


def test_b5_all_edges_in_one_batch_equal_each_alone():
    rules = [{"top_k": k, "top_p": p, "seed": 4} for k in (-1, 0, 1, 5, VOCAB, 10**7) for p in (0.0, 1e-9, 0.7, 1.0)]
    logits = logits_of(len(rules), seed=5)
    together = draw(logits, *(row(**rule) for rule in rules))
    assert together == [draw(logits[i : i + 1], row(**rule))[0] for i, rule in enumerate(rules)]


def test_a_row_does_not_depend_on_its_neighbours():
    logits = logits_of(24, seed=8)
    rules = [
        {"temperature": 0.0, "logprob_count": 3},
        {"seed": 1},
        {"seed": 2, "top_k": 9, "temperature": 0.7},
        {"seed": 3, "top_p": 0.8, "logprob_count": 0},
        {"seed": 4, "min_p": 0.1, "repetition_penalty": 1.3},
        {"temperature": 0.0, "presence_penalty": 1.5, "logit_bias": {3: 2.0}},
    ]
    rows = [row(output=range(i), **rules[i % len(rules)]) for i in range(24)]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], [one])[0] for i, one in enumerate(rows)]
    shuffled = list(reversed(range(24)))
    assert sample(logits[shuffled], [rows[i] for i in shuffled]) == [together[i] for i in shuffled]


def test_b2_choices_of_one_seed_differ_and_repeat():
    logits = torch.zeros(4, 1000)
    choices = [row(seed=7, choice=choice) for choice in range(4)]
    first = draw(logits, *choices)
    assert len(set(first)) == 4
    assert draw(logits, *choices) == first
    assert draw(logits, *(row(seed=8, choice=choice) for choice in range(4))) != first


@pytest.mark.parametrize(
    "rule", [{}, {"temperature": 0.6}, {"top_k": 6}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 12, "top_p": 0.8}]
)
def test_the_drawn_distribution_is_the_ruled_one(rule):
    """Chi-squared over 1,500 draws, with the truncation worked out independently."""
    logits = logits_of(1, seed=21)[0, :20] / 2
    p = torch.softmax(logits.double() / rule.get("temperature", 1.0), 0).numpy()
    order = np.argsort(-p)
    if "top_k" in rule:
        p[order[rule["top_k"] :]] = 0.0
        p /= p.sum()
    if "top_p" in rule:
        kept = int((np.cumsum(p[order]) < rule["top_p"]).sum()) + 1
        p[order[kept:]] = 0.0
    if "min_p" in rule:
        p[p < rule["min_p"] * p.max()] = 0.0
    p /= p.sum()
    count = 1500
    seen = np.bincount(draws(logits, count, seed=99, **rule), minlength=20)
    assert seen[p == 0].sum() == 0
    cells = p * count > 5
    statistic = ((seen[cells] - p[cells] * count) ** 2 / (p[cells] * count)).sum()
    freedom = int(cells.sum()) - 1
    # Wilson-Hilferty: about 4 sigma, so that a right sampler fails for no fixed seed in practice.
    limit = freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


def test_wide_and_narrow_rows_use_the_same_numbers():
    """A truncation that keeps the winner does not change the draw, whichever way its noise was made."""
    logits = logits_of(200, seed=2)
    free = draw(logits, *(row(seed=i) for i in range(200)))
    cut = draw(logits, *(row(seed=i, top_k=10) for i in range(200)))
    top = logits.topk(10).indices
    inside = [i for i in range(200) if free[i] in top[i]]
    assert len(inside) > 100
    assert [cut[i] for i in inside] == [free[i] for i in inside]


def test_penalties_follow_their_definitions():
    logits = torch.zeros(1, VOCAB)
    logits[0, :6] = torch.tensor([4.0, 3.9, 3.8, -0.5, 3.7, 3.6])
    greedy = {"temperature": 0.0}
    assert draw(logits, row(prompt=[0], output=[1], repetition_penalty=2.0, **greedy)) == [2]
    # Presence and frequency look at the output alone.
    assert draw(logits, row(prompt=[0], output=[1], presence_penalty=2.0, **greedy)) == [0]
    assert draw(logits, row(prompt=[], output=[0, 1], presence_penalty=2.0, **greedy)) == [2]
    assert draw(logits, row(prompt=[], output=[0], frequency_penalty=0.05, **greedy)) == [0]
    assert draw(logits, row(prompt=[], output=[0, 0, 0], frequency_penalty=0.05, **greedy)) == [1]
    # A negative logit is multiplied: it becomes less likely too.
    low = torch.full((1, VOCAB), -9.0)
    low[0, 3], low[0, 4] = -1.0, -1.5
    assert draw(low, row(prompt=[3, 3], repetition_penalty=2.0, **greedy)) == [4]


@pytest.mark.parametrize("end", [5, 6])
@pytest.mark.parametrize("prompt_length", [1, 50])
@pytest.mark.parametrize("minimum", [0, 1, 4])
def test_b9_end_tokens_come_right_after_min_tokens(minimum, prompt_length, end):
    logits = logits_of(1)
    rule = {"logit_bias": {end: 100.0}, "min_tokens": minimum, "banned_until_min_tokens": (5, 6)}
    for temperature in (0.0, 1.0):
        output: list[int] = []
        while len(output) < 10 and end not in output:
            one = row(prompt=[5] * prompt_length, output=output, temperature=temperature, **rule)
            output += draw(logits, one)
        assert output.index(end) == minimum
        assert not {5, 6} & set(output[:minimum])


def test_bad_rows_answer_none_and_spare_their_neighbours():
    logits = logits_of(6)
    logits[0, 3] = math.nan
    logits[1] = -math.inf
    logits[2, 9] = math.inf
    logits[3, 1:] = -math.inf
    greedy, random = {"temperature": 0.0}, {"seed": 1}
    for rule in (greedy, random, {"temperature": 0.0, "logit_bias": {2: 1.0}}):
        drawn = draw(logits, *(row(**rule) for _ in range(6)))
        assert drawn[:3] == [None] * 3
        assert drawn[3] == 0 if "logit_bias" not in rule else drawn[3] is not None
        assert drawn[4:] == draw(logits[4:], row(**rule), row(**rule))


def test_a_row_whose_rules_leave_nothing_answers_none():
    logits = torch.full((1, 4), -math.inf)
    logits[0, 2] = 1.0
    assert draw(logits, row(min_tokens=1, banned_until_min_tokens=(2,))) == [None]


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_b8_exactly_the_asked_alternatives_in_order(count):
    logits = logits_of(1)
    raw = torch.log_softmax(logits.double(), 1)[0]
    unlikely = int(raw.argmin())
    drawn = sample(logits, [row(logit_bias={unlikely: 100.0}, temperature=0.0, logprob_count=count)])[0]
    assert drawn.token_id == unlikely
    assert drawn.scores.chosen == [pytest.approx(raw[unlikely].item(), abs=1e-4)]  # raw: the bias is not in it
    assert drawn.scores.ranks == [VOCAB]
    assert drawn.scores.top_ids == [raw.topk(count).indices.tolist()]
    assert drawn.scores.top_logprobs == [pytest.approx(raw.topk(count).values.tolist(), abs=1e-4)]


def test_b8_no_scores_unless_asked_and_no_infinity():
    logits = logits_of(2)
    logits[1, 3:] = -math.inf
    plain, scored = sample(logits, [row(temperature=0.0), row(temperature=0.0, logprob_count=5)])
    assert plain.scores is None
    assert len(scored.scores.top_ids[0]) == 5
    assert scored.scores.top_logprobs[0][3:] == [float(LEAST_LOGPROB)] * 2
    assert all(math.isfinite(value) for value in scored.scores.top_logprobs[0])


def test_alternatives_beyond_the_vocabulary_are_clamped():
    drawn = sample(torch.zeros(1, 4), [row(temperature=0.0, logprob_count=20)])[0]
    assert drawn.scores.top_ids == [[0, 1, 2, 3]]


def test_equal_alternatives_are_ordered_by_id():
    logits = torch.zeros(1, VOCAB)
    logits[0, 50] = 1.0
    scores = score_prompt(logits, [60], 3)
    assert scores.top_ids == [[50, 0, 1]]
    assert scores.ranks == [2]


def test_prompt_scores_are_log_probabilities_of_the_targets():
    logits = logits_of(150)
    targets = [i % VOCAB for i in range(150)]
    raw = torch.log_softmax(logits.double(), 1)
    scores = score_prompt(logits, targets, 2)
    assert scores.chosen == pytest.approx([raw[i, t].item() for i, t in enumerate(targets)], abs=1e-4)
    assert scores.top_ids == raw.topk(2).indices.tolist()
    assert scores.ranks == [int((raw[i] > raw[i, t]).sum()) + 1 for i, t in enumerate(targets)]


def test_prompt_scores_of_bad_rows_are_nan():
    logits = logits_of(2)
    logits[0, 1] = math.nan
    scores = score_prompt(logits, [3, 4], 2)
    assert math.isnan(scores.chosen[0])
    assert math.isfinite(scores.chosen[1])
