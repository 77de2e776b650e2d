"""Both ways to accept drafts leave the target's distribution as it is: chi-squared against exact probabilities.

Two tokens of output, drafted by a good and by a bad draft. A test that could not see an acceptance off by two in a
hundred would prove nothing, so it is shown to see that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels import _native
from services.executor.backends.base import Sampled, SampleRow, SamplingRule
from services.executor.backends.cpu.samplers import make_sampler
from services.executor.sampling.draw import probabilities
from services.executor.sequences import Drafted, Ending, Sequence
from tests.unit.executor.speculation.rejection import verify

VOCAB = 6
SAMPLES = 200_000
NORMAL_LIMIT = 3.719
"""Of a standard normal number, exceeded with probability 1e-4."""
PROMPT = [1, 2, 2]
RULES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.5, "top_k": 4},
    {"top_p": 0.85},
    {"temperature": 1.3, "min_p": 0.1, "logit_bias": {0: 1.0, 3: -2.0}},
    {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"min_tokens": 2, "banned_until_min_tokens": (5, 4)},
]
NOISE = {"good": 0.3, "bad": 3.0}
"""Standard deviation of what is added to the target's logits to make the draft's."""

Logits = NDArray[np.float32]
Counts = NDArray[np.int64]


def target_logits() -> Logits:
    """By the token before, the prompt's last first: [VOCAB, VOCAB]."""
    return np.random.default_rng(5).normal(0, 1.5, (VOCAB, VOCAB)).astype(np.float32)


def draft_logits(name: str) -> Logits:
    return target_logits() + np.random.default_rng(6).normal(0, NOISE[name], (VOCAB, VOCAB)).astype(np.float32)


def given(logits: Logits, rule: SamplingRule, output: list[int]) -> NDArray[np.float64]:
    """Probabilities of the token after `output`."""
    return probabilities(logits[[*PROMPT, *output][-1]], SampleRow(0, rule, PROMPT, output))


def exact(rule: SamplingRule) -> NDArray[np.float64]:
    """Of each pair of tokens."""
    first = given(target_logits(), rule, [])
    return first[:, None] * np.stack([given(target_logits(), rule, [token]) for token in range(VOCAB)])


def assert_fits(counts: Counts, expected: NDArray[np.float64]) -> None:
    assert counts[expected == 0].sum() == 0
    cells = expected * counts.sum() >= 5
    observed = np.append(counts[cells], counts[~cells].sum()).astype(float)
    wanted = np.append(expected[cells], expected[~cells].sum()) * counts.sum()
    if wanted[-1] < 5:
        observed[-2], wanted[-2] = observed[-2] + observed[-1], wanted[-2] + wanted[-1]
        observed, wanted = observed[:-1], wanted[:-1]
    freedom = len(wanted) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + NORMAL_LIMIT * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson and Hilferty
    assert ((observed - wanted) ** 2 / wanted).sum() < limit


def by_rejection(rule: SamplingRule, draft: Logits, bias: float = 0.0) -> Counts:
    """Pairs out of SAMPLES runs of two drafts; one that gives a single token is followed by a run of one draft.

    `bias` makes the rule accept that much more often.
    """
    random = np.random.default_rng(1)
    p = [given(target_logits(), rule, []), *(given(target_logits(), rule, [token]) for token in range(VOCAB))]
    q = [given(draft, rule, []), *(given(draft, rule, [token]) for token in range(VOCAB))]
    after = np.stack(p[1:])

    def choose(probabilities: NDArray[np.float64]) -> NDArray[np.int64]:
        sums = probabilities.cumsum(axis=1)
        chosen: NDArray[np.int64] = (sums <= random.random((len(sums), 1)) * sums[:, -1:]).sum(axis=1)
        return chosen

    def uniforms(runs: int, places: int) -> NDArray[np.float64]:
        found = random.random((runs, places, 2))
        found[..., 0] *= random.random((runs, places)) >= bias
        return found

    firsts = choose(np.tile(q[0], (SAMPLES, 1)))
    seconds = choose(np.stack(q[1:])[firsts])
    drafts = np.stack((firsts, seconds), axis=1)
    target = np.stack((np.tile(p[0], (SAMPLES, 1)), after[firsts], np.full((SAMPLES, VOCAB), 1 / VOCAB)), axis=1)
    drafted = np.stack((np.tile(q[0], (SAMPLES, 1)), np.stack(q[1:])[firsts]), axis=1)
    token_ids, counts = verify(target, drafted, drafts, uniforms(SAMPLES, 3))
    short = counts == 1
    first = token_ids[short, 0]
    second = choose(np.stack(q[1:])[first])
    target = np.stack((after[first], np.full((len(first), VOCAB), 1 / VOCAB)), axis=1)
    again, _ = verify(target, np.stack(q[1:])[first][:, None], second[:, None], uniforms(len(first), 2))
    token_ids[short, 1] = again[:, 0]
    pairs = np.zeros((VOCAB, VOCAB), np.int64)
    np.add.at(pairs, (token_ids[:, 0], token_ids[:, 1]), 1)
    return pairs


@pytest.mark.parametrize("quality", NOISE)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_rejection_rule(rule: dict[str, Any], quality: str) -> None:
    ruled = SamplingRule(**rule)
    assert_fits(by_rejection(ruled, draft_logits(quality)), exact(ruled))


@pytest.mark.parametrize("rule", [RULES[i] for i in (0, 1, 4, 5)], ids=str)
def test_a_rejection_rule_off_by_two_in_a_hundred_is_seen(rule: dict[str, Any]) -> None:
    ruled = SamplingRule(**rule)
    with pytest.raises(AssertionError):
        assert_fits(by_rejection(ruled, draft_logits("bad"), bias=0.02), exact(ruled))


Alter = Callable[[int, list[int], list[int]], None]


def drawn(logits: Logits, rule: SamplingRule, output: list[int]) -> int:
    """The token after `output`, by the native sampler."""
    row = SampleRow(0, rule, PROMPT, output)
    sampler = make_sampler(row, VOCAB)
    sampler.observe(output)
    return _native.sample_row(sampler, logits[[*PROMPT, *output][-1]], len(output), _native.instruction_sets()[-1])


def by_shared_noise(
    rule: dict[str, Any], draft: Logits, samples: int, alter: Alter | None = None
) -> tuple[Counts, int]:
    """Pairs out of requests with a seed each, and how many drafts were accepted. `alter` may change what was drawn."""
    target = target_logits()
    pairs = np.zeros((VOCAB, VOCAB), np.int64)
    accepted = 0
    for seed in range(samples):
        ruled = SamplingRule(seed=seed, **rule)
        sequence = Sequence(1, list(PROMPT), len(PROMPT), len(PROMPT), ruled, Ending(frozenset(), 2))
        while len(output := sequence.output) < 2:
            drafts: list[int] = []
            while len(output) + len(drafts) < 2:
                drafts.append(drawn(draft, ruled, output + drafts))
            found = [drawn(target, ruled, output + drafts[:place]) for place in range(len(drafts) + 1)]
            if alter is not None:
                alter(seed, found, drafts)
            sequence.sample_row.draft_ids = drafts
            sequence.unreported.drafted.append(Drafted(len(drafts)))
            sequence.take([Sampled(token, None) for token in found])
            accepted += sequence.unreported.drafted[-1].accepted
        pairs[sequence.output[0], sequence.output[1]] += 1
    return pairs, accepted


@pytest.mark.parametrize("quality", NOISE)
@pytest.mark.parametrize("rule", [RULES[0], RULES[5]], ids=str)
def test_drafts_of_the_same_noise(rule: dict[str, Any], quality: str) -> None:
    pairs, accepted = by_shared_noise(rule, draft_logits(quality), 20_000)
    assert_fits(pairs, exact(SamplingRule(**rule)))
    assert accepted > (20_000 if quality == "good" else 5_000)


@pytest.mark.full
@pytest.mark.parametrize("quality", NOISE)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_many_drafts_of_the_same_noise(rule: dict[str, Any], quality: str) -> None:
    pairs, _ = by_shared_noise(rule, draft_logits(quality), SAMPLES)
    assert_fits(pairs, exact(SamplingRule(**rule)))


@pytest.mark.full
def test_acceptance_of_the_same_noise_off_by_two_in_a_hundred_is_seen() -> None:
    def lie(seed: int, found: list[int], drafts: list[int]) -> None:
        if seed % 50 == 0:
            found[0] = drafts[0]

    pairs, _ = by_shared_noise({}, draft_logits("bad"), SAMPLES, lie)
    with pytest.raises(AssertionError):
        assert_fits(pairs, exact(SamplingRule()))


def test_equal_distributions_accept_everything_and_disjoint_ones_nothing() -> None:
    random = np.random.default_rng(3)
    p = random.dirichlet(np.ones(VOCAB), (500, 3))
    drafts = np.array([[random.choice(VOCAB, p=row) for row in rows[:2]] for rows in p])
    assert (verify(p, p[:, :2], drafts, random.random((500, 3, 2))).counts == 3).all()
    half = np.zeros((500, 2, VOCAB))
    half[..., :3] = 1 / 3
    other = half[:, :1, ::-1]
    found = verify(half, other, np.full((500, 1), 4), random.random((500, 2, 2)))
    assert (found.counts == 1).all()
    assert (found.token_ids[:, 0] < 3).all()
