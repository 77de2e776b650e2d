"""The native sampler against services.executor.sampling, on every instruction set that this machine runs."""

import math
from dataclasses import replace

import numpy as np
import pytest

from kernels import _native
from services.executor.backends.base import SampleRow, SamplingRule
from services.executor.backends.cpu.samplers import make_sampler
from services.executor.sampling import draw, philox

SETS = _native.instruction_sets()
SIZES = (33, 257, 4100)
NEAR = 1e-5  # scores that differ by less may come out in either order: exp and log differ in the last bit
BIG = 49152
pytestmark = pytest.mark.parametrize("instruction_set", SETS)


def row_of(prompt=(), output=(), **rule):
    return SampleRow(0, SamplingRule(**rule), list(prompt), list(output))


def sampler_of(row, vocab):
    sampler = make_sampler(row, vocab)
    sampler.observe(row.output_ids)
    return sampler


def drawn(logits, row, instruction_set, allowed=None):
    return _native.sample_row(sampler_of(row, len(logits)), logits, len(row.output_ids), instruction_set, allowed)


def expected(logits, row):
    return draw.draw([logits], [row])[0] if math.isfinite(logits[logits.argmax()]) else -1


def noisy(logits, row):
    """Scaled logits plus noise, -inf for what is cut off: what a draw takes the argmax of."""
    changed = draw.apply_rules(logits, row)
    if draw.is_greedy(row.rule):
        return changed
    scaled = (changed - changed.max()) / np.float32(row.rule.temperature)
    words = philox.all_words(philox.NoiseKey(row.rule.seed, row.rule.choice, len(row.output_ids)), len(logits))
    return np.where(scaled >= draw._floor(scaled, row.rule), scaled + philox.gumbel(words), -np.inf)


def assert_same_draw(logits, row, instruction_set):
    token, wanted = drawn(logits, row, instruction_set), expected(logits, row)
    if token != wanted:
        found = noisy(logits, row)
        assert min(token, wanted) >= 0, (token, wanted, row.rule)
        assert found[token] == pytest.approx(found[wanted], abs=NEAR), (token, wanted, row.rule)


def kinds_of_logits(rng, vocab):
    """Rows that look like a model's, flat ones, many ties, one clear winner, gaps of -inf."""
    normal = rng.normal(-3, 3, vocab).astype(np.float32)
    peaked, gaps = normal.copy(), normal.copy()
    peaked[rng.integers(vocab)] += 12
    gaps[rng.random(vocab) < 0.5] = -np.inf
    gaps[rng.integers(vocab)] = 2.0
    return [normal, np.zeros(vocab, np.float32), np.round(normal), peaked, gaps, normal * np.float32(0.1)]


RULES = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 20},
    {"top_k": 32},
    {"top_k": 10**7},
    {"top_k": -1},
    {"top_p": 0.0},
    {"top_p": 1e-9},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.99},
    {"top_p": 0.999999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 1e-6},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 15, "top_p": 0.95, "min_p": 0.02, "temperature": 0.8},
    {"logit_bias": {0: 3.0, 7: -100.0, 32: 5.5}},
    {"logit_bias": {5: -math.inf}, "temperature": 0.0},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "temperature": 0.0},
    {"presence_penalty": 1.5, "temperature": 0.0},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.1},
    {"min_tokens": 9, "banned_until_min_tokens": (3, 32, 3)},
    {"min_tokens": 2, "banned_until_min_tokens": (3, 32)},
]


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_each_rule(rule, vocab, instruction_set):
    rng = np.random.default_rng(vocab)
    for seed, logits in enumerate(kinds_of_logits(rng, vocab) * 3):
        prompt, output = rng.integers(vocab, size=12).tolist(), rng.integers(vocab // 4, size=5).tolist()
        assert_same_draw(logits, row_of(prompt, output, seed=seed, **rule), instruction_set)


def random_rule(rng, vocab):
    def sometimes(value):
        return value if rng.random() < 0.5 else None

    ids = rng.permutation(vocab)[:6].tolist()
    rule = {
        "temperature": sometimes(float(rng.choice([0.0, 0.3, 0.7, 1.3, 2.0]))),
        "top_k": sometimes(int(rng.choice([2, 5, 40, vocab - 1, vocab]))),
        "top_p": sometimes(float(rng.random())),
        "min_p": sometimes(float(rng.random() ** 3)),
        "repetition_penalty": sometimes(float(rng.uniform(0.5, 2))),
        "presence_penalty": sometimes(float(rng.uniform(-2, 2))),
        "frequency_penalty": sometimes(float(rng.uniform(-2, 2))),
        "logit_bias": sometimes({ids[0]: 4.0, ids[1]: -7.25, ids[2]: -math.inf}),
        "min_tokens": sometimes(int(rng.integers(40))),
        "banned_until_min_tokens": tuple(ids[3:]),
        "seed": int(rng.integers(-(2**63), 2**63)),
        "choice": int(rng.integers(4)),
    }
    return {name: value for name, value in rule.items() if value is not None}


@pytest.mark.parametrize("part", range(4))
def test_rules_together(part, instruction_set):
    rng = np.random.default_rng(part)
    for _ in range(60):
        vocab = int(rng.choice(SIZES))
        kinds = kinds_of_logits(rng, vocab)
        prompt, output = rng.integers(vocab, size=30).tolist(), rng.integers(vocab, size=rng.integers(40)).tolist()
        row = row_of(prompt, output, **random_rule(rng, vocab))
        assert_same_draw(kinds[rng.integers(len(kinds))], row, instruction_set)


@pytest.mark.parametrize(
    "rule", [{}, {"top_k": 50}, {"top_k": 3000}, {"top_p": 0.9}, {"top_p": 0.99, "temperature": 1.5}, {"min_p": 0.05}]
)
def test_a_whole_vocabulary(rule, instruction_set):
    rng = np.random.default_rng(1)
    for seed, logits in enumerate(kinds_of_logits(rng, BIG)):
        assert_same_draw(logits, row_of(seed=seed, **rule), instruction_set)


@pytest.mark.parametrize("vocab", [1, 2, 31, 32, 64, 65, 127, 128, 129])
def test_vocabularies_around_whole_vectors(vocab, instruction_set):
    rng = np.random.default_rng(vocab)
    rules = [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.3}, {"logit_bias": {vocab - 1: 2.0}}]
    for seed, logits in enumerate(kinds_of_logits(rng, vocab)):
        for rule in rules:
            assert_same_draw(logits, row_of(seed=seed, **rule), instruction_set)


@pytest.mark.parametrize("vocab", [*SIZES, BIG])
@pytest.mark.parametrize(
    ("seed", "choice", "position"), [(0, 0, 0), (7, 3, 1), (-1, 0, 500), (2**64 - 5, 2**31, 2**31), (-(2**63), 1, 9)]
)
def test_random_words_are_those_of_the_layout(seed, choice, position, vocab, instruction_set):
    sampler = sampler_of(row_of(seed=seed, choice=choice), vocab)
    words = _native.noise_words(sampler, position, instruction_set)
    assert words == philox.all_words(philox.NoiseKey(seed, choice, position), vocab).tolist()


@pytest.mark.parametrize(
    "rule", [{}, {"temperature": 0.6}, {"top_k": 6}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 12, "top_p": 0.8}]
)
def test_the_drawn_distribution_is_the_ruled_one(rule, instruction_set):
    """Chi-squared over 20,000 draws, with the truncation worked out independently."""
    logits = np.random.default_rng(21).normal(0, 1.5, 40).astype(np.float32)
    p = np.exp(logits.astype(np.float64) / rule.get("temperature", 1.0))
    order = np.argsort(-p)
    p[order[rule.get("top_k", 40) :]] = 0.0
    p /= p.sum()
    p[order[(np.cumsum(p[order]) < rule.get("top_p", 1.0)).sum() + 1 :]] = 0.0
    p[p < rule.get("min_p", 0.0) * p.max()] = 0.0
    p /= p.sum()
    count = 20_000
    sampler = sampler_of(row_of(seed=99, **rule), len(p))
    tokens = [_native.sample_row(sampler, logits, position, instruction_set) for position in range(count)]
    seen = np.bincount(tokens, minlength=len(p))
    assert seen[p == 0].sum() == 0
    cells = p * count > 5
    statistic = ((seen[cells] - p[cells] * count) ** 2 / (p[cells] * count)).sum()
    freedom = int(cells.sum()) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson-Hilferty, 4 sigma
    assert statistic < limit


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-4, 1e-2])
def test_tiny_temperatures_are_greedy(temperature, instruction_set):
    logits = np.random.default_rng(4).normal(0, 3, 257).astype(np.float32)
    order = np.argsort(-logits).tolist()
    rule = {"temperature": temperature, "seed": 3}
    assert drawn(logits, row_of(**rule), instruction_set) == order[0]
    biased = row_of(logit_bias={order[0]: -math.inf, order[1]: -100.0}, **rule)
    assert drawn(logits, biased, instruction_set) == order[2]


def test_a_tiny_temperature_does_not_overflow(instruction_set):
    logits = np.random.default_rng(4).normal(0, 1e37, 257).astype(np.float32)
    assert drawn(logits, row_of(temperature=2e-5), instruction_set) == logits.argmax()


def test_greedy_ties_go_to_the_lowest_id(instruction_set):
    logits = np.zeros(257, np.float32)
    logits[[200, 41, 256]] = 5.0
    assert drawn(logits, row_of(temperature=0.0), instruction_set) == 41
    assert drawn(logits, row_of(temperature=0.0, logit_bias={90: 5.0, 11: 5.0}), instruction_set) == 11


@pytest.mark.parametrize("vocab", [*SIZES, BIG])
@pytest.mark.parametrize("rule", [{"temperature": 0.0}, {}, {"top_p": 0.9, "top_k": 9}, {"logit_bias": {1: 1.0}}])
def test_rows_that_are_not_finite(rule, vocab, instruction_set):
    row = row_of(seed=1, **rule)
    good = np.random.default_rng(2).normal(0, 3, vocab).astype(np.float32)
    for at in (0, 1, 7, 31, vocab // 2, vocab - 1):
        for bad in (math.nan, -math.nan, math.inf):
            logits = good.copy()
            logits[at] = bad
            assert drawn(logits, row, instruction_set) == -1
        lone = np.full(vocab, -np.inf, np.float32)
        lone[at] = 1.0
        assert drawn(lone, row, instruction_set) == at
    assert drawn(np.full(vocab, -np.inf, np.float32), row, instruction_set) == -1
    both = good.copy()
    both[3], both[4] = -np.inf, np.inf
    assert drawn(both, row, instruction_set) == -1


def test_a_ban_does_not_hide_a_broken_row(instruction_set):
    logits = np.zeros(33, np.float32)
    logits[32] = math.nan
    assert drawn(logits, row_of(min_tokens=1, banned_until_min_tokens=(32,)), instruction_set) == -1


def test_rules_that_leave_nothing(instruction_set):
    logits = np.full(33, -np.inf, np.float32)
    logits[2] = 1.0
    assert drawn(logits, row_of(min_tokens=1, banned_until_min_tokens=(2,)), instruction_set) == -1
    assert drawn(logits, row_of(logit_bias={2: -math.inf}), instruction_set) == -1


def bits_of(ids, vocab):
    bits = np.zeros((vocab + 31) // 32 * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
@pytest.mark.parametrize("rule", [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.9}, {"repetition_penalty": 1.5}])
def test_only_allowed_tokens_are_drawn(rule, share, vocab, instruction_set):
    rng = np.random.default_rng(vocab)
    for seed, logits in enumerate(kinds_of_logits(rng, vocab)[:4]):
        allowed = np.flatnonzero(rng.random(vocab) < share).tolist() or [vocab - 1]
        refused = dict.fromkeys(set(range(vocab)) - set(allowed), -math.inf)
        row = row_of([1, 2, 3], [4, 5], seed=seed, **rule)
        token = drawn(logits, row, instruction_set, bits_of(allowed, vocab))
        assert token in allowed
        assert token == expected(logits, replace(row, rule=replace(row.rule, logit_bias=refused)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_of_nothing_and_of_more_than_the_vocabulary(temperature, instruction_set):
    logits = np.random.default_rng(3).normal(size=33).astype(np.float32)
    row = row_of(seed=5, temperature=temperature)
    assert drawn(logits, row, instruction_set, np.zeros(2, np.uint32)) == -1
    assert drawn(logits, row, instruction_set, np.array([0, 2**32 - 2], np.uint32)) == -1  # only ids from 33 on
    all_of_them = np.full(2, 2**32 - 1, np.uint32)
    assert drawn(logits, row, instruction_set, all_of_them) == drawn(logits, row, instruction_set)


def test_a_draw_leaves_the_logits_alone(instruction_set):
    logits = np.random.default_rng(3).normal(size=257).astype(np.float32)
    before = logits.copy()
    logits.flags.writeable = False
    drawn(logits, row_of([1], [2], top_k=3, repetition_penalty=2.0, logit_bias={4: 1.0}), instruction_set)
    np.testing.assert_array_equal(logits, before)


def test_history_grows_piece_by_piece(instruction_set):
    rng = np.random.default_rng(6)
    output = rng.integers(20, size=60).tolist()
    rule = {"frequency_penalty": 0.4, "presence_penalty": 0.2, "repetition_penalty": 1.2, "seed": 2}
    grown = sampler_of(row_of([3, 3, 25], **rule), 33)
    for position in range(60):
        logits = rng.normal(0, 2, 33).astype(np.float32)
        row = row_of([3, 3, 25], output[:position], **rule)
        assert grown.observed == position
        assert _native.sample_row(grown, logits, position, instruction_set) == expected(logits, row)
        grown.observe(output[position : position + 1])


def test_takes_argmax_and_needs_history(instruction_set):
    rng = np.random.default_rng(8)
    for _ in range(200):
        row = row_of([1], rng.integers(33, size=rng.integers(30)).tolist(), **random_rule(rng, 33))
        sampler = sampler_of(row, 33)
        assert sampler.takes_argmax(len(row.output_ids)) == draw.takes_argmax(row)
        assert sampler.needs_history == draw._penalizes(row.rule)


@pytest.mark.parametrize("token", [-1, 33, 2**40])
def test_ids_outside_the_vocabulary_are_refused(token, instruction_set):
    for field in ({"logit_bias": {token: 1.0}}, {"banned_until_min_tokens": (2, token)}, {"prompt": [0, token]}):
        with pytest.raises(ValueError, match=f"token id {token} is outside the vocabulary of 33"):
            sampler_of(row_of(**field), 33)
    sampler = sampler_of(row_of(), 33)
    with pytest.raises(ValueError, match=f"output: token id {token} is outside"):
        sampler.observe([4, token])
    assert sampler.observed == 0
    if token < 2**31:
        with pytest.raises(ValueError, match="target"):
            _native.score_row(np.zeros(33, np.float32), token, 0, instruction_set)


def test_wrong_lengths_and_names_are_refused(instruction_set):
    sampler = sampler_of(row_of(), 33)
    logits = np.zeros(33, np.float32)
    with pytest.raises(ValueError, match="length of the vocabulary"):
        _native.sample_row(sampler, logits[:32], 0, instruction_set)
    with pytest.raises(ValueError, match="a bit per token"):
        _native.sample_row(sampler, logits, 0, instruction_set, np.zeros(1, np.uint32))
    with pytest.raises(ValueError, match="instruction set mmx"):
        _native.sample_row(sampler, logits, 0, "mmx")
    with pytest.raises(ValueError, match="count"):
        _native.score_row(logits, 0, -1, instruction_set)
    with pytest.raises(ValueError, match="vocab_size"):
        sampler_of(row_of(), 0)
