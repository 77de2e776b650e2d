"""The cpu backend against a float64 forward pass written apart, on every instruction set that this CPU has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels import _native
from services.common.errors import QuireError, Reason
from services.executor.backends.base import (
    KvShape,
    PromptScoreRows,
    SampleRow,
    SamplingRule,
    StepInputs,
    TokenScores,
)
from services.executor.backends.cpu.backend import CpuBackend
from services.executor.models.checkpoint import open_checkpoint
from services.executor.sampling.draw import draw, single_rows
from services.executor.sampling.scores import score
from tests.fixtures.models import LLAMA3_SCALING, first_layers, make_rand_model, reference_logits

SETS = _native.instruction_sets()
BLOCKS = 24
TABLE_WIDTH = 8
BUDGET = {"fp32": 5e-4, "bf16": 0.6}
"""Largest difference of a logit by the format of keys and values; logits reach about 10."""


def load(path: Path, **options: Any) -> CpuBackend:
    backend = CpuBackend.load(open_checkpoint(path), **options)
    backend.allocate_kv(KvShape(32, backend.kv_block_bytes(32), BLOCKS))
    return backend


class Sequences:
    """Feeds sequences over shuffled blocks; `logits` of all rows come back per sequence."""

    def __init__(self, backend: CpuBackend) -> None:
        self.backend = backend
        self.computed: dict[int, int] = {}
        self.tables = np.random.default_rng(0).permutation(BLOCKS).astype(np.int32).reshape(-1, TABLE_WIDTH)

    def inputs(self, chunks: dict[int, Sequence[int]]) -> StepInputs:
        starts = [self.computed.get(sequence, 0) for sequence in chunks]
        self.computed |= {s: start + len(chunks[s]) for s, start in zip(chunks, starts, strict=True)}
        counts = [len(tokens) for tokens in chunks.values()]
        return StepInputs(
            token_ids=np.concatenate([np.array(tokens, np.int32) for tokens in chunks.values()]),
            positions=np.concatenate(
                [np.arange(start, start + count, dtype=np.int32) for start, count in zip(starts, counts, strict=True)]
            ),
            query_starts=np.cumsum([0, *counts], dtype=np.int32),
            context_lengths=np.array([self.computed[sequence] for sequence in chunks], np.int32),
            block_tables=self.tables[list(chunks)],
            samples=[],
        )

    def logits(self, chunks: dict[int, Sequence[int]]) -> dict[int, NDArray[np.float32]]:
        inputs = self.inputs(chunks)
        found = self.backend.logits(inputs, range(len(inputs.token_ids)))
        return dict(zip(chunks, np.split(found, inputs.query_starts[1:-1]), strict=True))


def ids_of(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 256, count)]


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ({}, {}),
        ({}, {"tie_word_embeddings": True}),
        ({}, {"attention_bias": True, "mlp_bias": True}),
        ({"kv_heads": 4}, {}),
        ({"heads": 3, "kv_heads": 1, "head_size": 20, "hidden": 48, "intermediate": 100}, {}),
        ({"head_size": 32}, {"rope_scaling": LLAMA3_SCALING}),
        ({}, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 500.0}),
    ],
    ids=str,
)
def test_logits_equal_an_uncached_pass(
    tmp_path: Path, shape: dict[str, int], config: dict[str, Any], instruction_set: str
) -> None:
    path = make_rand_model(tmp_path, 5, config=config, **shape)
    sequences = Sequences(load(path, instruction_set=instruction_set))
    ids = ids_of(1, 100)
    expected = reference_logits(path, ids).numpy()
    found = [sequences.logits({0: ids[:70]})[0], *(sequences.logits({0: [token]})[0] for token in ids[70:])]
    assert float(np.abs(expected).max()) > 3
    assert float(np.abs(np.concatenate(found) - expected).max()) < BUDGET["fp32"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rand_model(tmp_path_factory.mktemp("rand"), 3)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("kv_format", BUDGET)
def test_mixed_batches_equal_an_uncached_pass(path: Path, kv_format: str, instruction_set: str) -> None:
    """Prompts in chunks beside decodes; bf16 keys and values under fp32 weights."""
    sequences = Sequences(load(path, kv_format=kv_format, instruction_set=instruction_set))
    prompts = {i: ids_of(i, 5 + 70 * i) for i in range(3)}
    fed = dict.fromkeys(prompts, 0)
    while left := {i: prompt[fed[i] :] for i, prompt in prompts.items() if fed[i] < len(prompt)}:
        chunks = {i: rest[: 1 if fed[i] > 120 else 29] for i, rest in left.items()}
        for i, found in sequences.logits(chunks).items():
            end = fed[i] + len(chunks[i])
            expected = reference_logits(path, prompts[i][:end]).numpy()[fed[i] :]
            assert float(np.abs(found - expected).max()) < BUDGET[kv_format]
            fed[i] = end


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_row_depends_on_its_own_sequence_alone(path: Path, dtype: str) -> None:
    """Bit for bit: whole, in chunks, beside others, on more threads."""
    ids, other = ids_of(7, 90), ids_of(8, 60)
    whole = Sequences(load(path, dtype=dtype)).logits({0: ids})[0]
    runs = Sequences(load(path, dtype=dtype, threads=2))
    pieces = [
        runs.logits({1: other[:40], 0: ids[:13]})[0],
        runs.logits({0: ids[13:14]})[0],
        runs.logits({2: other, 0: ids[14:89], 1: other[40:]})[0],
        runs.logits({0: ids[89:]})[0],
    ]
    assert np.array_equal(np.concatenate(pieces), whole)


def test_copied_blocks_serve_another_sequence(path: Path) -> None:
    backend = load(path)
    ids = ids_of(2, 64)
    sequences = Sequences(backend)
    expected = sequences.logits({0: [*ids, 9]})[0][-1:]
    backend.copy_blocks([(int(sequences.tables[0, i]), int(sequences.tables[1, i])) for i in range(2)])
    sequences.computed[1] = 64
    assert np.array_equal(sequences.logits({1: [9]})[1], expected)
    backend.copy_blocks([])


def test_says_what_it_computes_with(path: Path) -> None:
    backend = load(path, threads=2, instruction_set="portable")
    assert (backend.name, backend.dtype, backend.kv_format) == ("cpu", "fp32", "fp32")
    assert backend.device == "cpu portable, 2 threads"
    assert backend.numerics == load(path, instruction_set="portable").numerics, "threads change no logit"
    others = [load(path, **one) for one in ({"kv_format": "bf16"}, {"dtype": "bf16"})]
    assert [(other.dtype, other.kv_format) for other in others] == [("fp32", "bf16"), ("bf16", "bf16")]
    seen = {one.numerics for one in (backend, *others, *(load(path, instruction_set=name) for name in SETS))}
    assert len(seen) == 2 + len(SETS)


def test_blocks_hold_32_tokens(path: Path) -> None:
    backend = load(path)
    # 2 layers, keys and values, 2 heads padded from 16 to 32, 32 slots, 4 bytes
    assert backend.kv_block_bytes(32) == 2 * 2 * 2 * 32 * 32 * 4
    with pytest.raises(ValueError, match="32"):
        backend.kv_block_bytes(16)


@pytest.mark.parametrize("length", [0, 1025])
def test_refuses_a_context_beyond_the_models(path: Path, length: int) -> None:
    with pytest.raises(QuireError, match="context_length") as error:
        load(path, context_length=length)
    assert error.value.reason is Reason.INVALID_FIELD


def test_imports_neither_torch_nor_transformers(path: Path) -> None:
    code = (
        "import sys\n"
        "from services.executor import main\n"
        "from services.executor.loader import make_loader\n"
        "from services.executor.settings import ExecutorSettings\n"
        "from services.executor.warmup import warm_up\n"
        f"model = make_loader(ExecutorSettings.model_validate({{'kv_blocks': 4}}))('m', {str(path)!r})\n"
        "assert model.backend.name == 'cpu'\n"
        "warm_up(model.backend, model.shape, 64, 256)\n"
        "print(sorted({'torch', 'transformers', 'gguf', 'safetensors'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr


RULES = [
    SamplingRule(temperature=0.0),
    SamplingRule(temperature=0.0, logprob_count=3),
    SamplingRule(temperature=0.0, repetition_penalty=1.8, frequency_penalty=0.5, presence_penalty=0.3),
    SamplingRule(temperature=1.0, seed=4),
    SamplingRule(temperature=1.3, seed=5, choice=2, logprob_count=0),
    SamplingRule(temperature=0.9, top_k=7, seed=-6),
    SamplingRule(temperature=1.1, top_p=0.8, min_p=0.02, seed=7, repetition_penalty=0.7),
    SamplingRule(temperature=1.0, seed=8, logit_bias={3: 60.0, 200: 61.0}, logprob_count=2),
    SamplingRule(temperature=1.0, seed=9, min_tokens=5, banned_until_min_tokens=tuple(range(0, 256, 2))),
    SamplingRule(temperature=0.0, min_tokens=5, banned_until_min_tokens=tuple(range(0, 256, 2))),
]


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_draws_and_scores_by_the_rules(path: Path, rule: SamplingRule, instruction_set: str) -> None:
    """Ten tokens by the native sampler, each what the reference draws from the same logits."""
    sequences = Sequences(load(path, instruction_set=instruction_set))
    prompt, output = ids_of(3, 9), []
    row = SampleRow(0, rule, prompt, output)
    chunk = prompt
    for _ in range(10):
        logits = sequences.logits({0: chunk})[0][-1]
        inputs = sequences.inputs({1: chunk})
        row.row = len(chunk) - 1
        inputs.samples = [row]
        (sampled,) = sequences.backend.step(inputs).sampled
        assert sampled is not None
        assert [sampled.token_id] == draw([logits], [row])
        if rule.logprob_count < 0:
            assert sampled.scores is None
        else:
            check_scores(sampled.scores, score([logits], [sampled.token_id], rule.logprob_count))
        chunk = [sampled.token_id]
        output += chunk


def check_scores(found: TokenScores | None, expected: TokenScores) -> None:
    assert found is not None
    assert found.chosen == pytest.approx(expected.chosen, abs=1e-5)
    assert (found.ranks, found.top_ids) == (expected.ranks, expected.top_ids)
    for some, others in zip(found.top_logprobs, expected.top_logprobs, strict=True):
        assert some == pytest.approx(others, abs=1e-5)


@pytest.mark.parametrize("rule", [RULES[2], RULES[6]], ids=str)
def test_a_resumed_sequence_draws_what_it_would_have(path: Path, rule: SamplingRule) -> None:
    """Its first row comes with output already; penalties count it."""
    sequences = Sequences(load(path))
    tokens = ids_of(3, 30)
    logits = sequences.logits({0: tokens})[0][-1]
    inputs = sequences.inputs({1: tokens})
    inputs.samples = [SampleRow(29, rule, tokens[:12], tokens[12:])]
    (sampled,) = sequences.backend.step(inputs).sampled
    assert sampled is not None
    assert [sampled.token_id] == draw([logits], inputs.samples)


def test_mixed_rows_and_prompt_scores_of_one_step(path: Path) -> None:
    backend = load(path)
    prompts = [ids_of(i, 20 + i) for i in range(3)]
    logits = Sequences(backend).logits(dict(enumerate(prompts)))
    inputs = Sequences(backend).inputs(dict(enumerate(prompts)))
    ends = [int(end) - 1 for end in inputs.query_starts[1:]]
    inputs.samples = [SampleRow(ends[i], RULES[rule], prompts[i], []) for i, rule in ((0, 7), (2, 0))]
    inputs.prompt_scores = [PromptScoreRows(int(inputs.query_starts[1]), prompts[1][1:], 2)]
    outputs = backend.step(inputs)
    expected = draw([logits[0][-1], logits[2][-1]], inputs.samples)
    assert [sampled.token_id for sampled in outputs.sampled if sampled is not None] == expected
    (found,) = outputs.prompt_scores
    check_scores(found, score(list(logits[1][:-1]), prompts[1][1:], 2))


def test_a_step_may_sample_nothing(path: Path) -> None:
    backend = load(path)
    outputs = backend.step(Sequences(backend).inputs({0: [1, 2, 3]}))
    assert (outputs.sampled, outputs.prompt_scores) == ([], [])


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_draws_after_drafts_as_if_they_were_output(path: Path, rule: SamplingRule, instruction_set: str) -> None:
    """Each place of a run is drawn as the reference draws it alone; the run leaves nothing behind in the sampler."""
    sequences = Sequences(load(path, instruction_set=instruction_set))
    prompt, output, drafts = ids_of(3, 9), [7, 7, 8], [8, 5, 8, 8, 30]
    chunk = [*prompt, *output, *drafts]
    logits = sequences.logits({0: chunk})[0]
    row = SampleRow(11, rule, prompt, output)
    for first_place in (0, 3, 5):
        row.draft_ids, row.first_place, row.row = drafts, first_place, 11 + first_place
        inputs = sequences.inputs({1: chunk})
        sequences.computed[1] = 0
        inputs.samples = [row]
        sampled = [one for one in sequences.backend.step(inputs).sampled if one is not None]
        places = range(first_place, 6)
        singles = [SampleRow(0, rule, prompt, [*output, *drafts[:place]]) for place in places]
        assert [one.token_id for one in sampled] == draw([logits[11 + place] for place in places], singles)
        for place, one in zip(places, sampled, strict=True):
            if rule.logprob_count >= 0:
                check_scores(one.scores, score([logits[11 + place]], [one.token_id], rule.logprob_count))
    row.draft_ids, row.first_place, row.row = (), 0, 11
    inputs = sequences.inputs({1: chunk})
    inputs.samples = [row]
    (sampled,) = sequences.backend.step(inputs).sampled
    assert sampled is not None
    assert [sampled.token_id] == draw([logits[11]], [SampleRow(0, rule, prompt, output)])


def test_rows_with_and_without_drafts_share_a_step(path: Path) -> None:
    backend = load(path)
    tokens = [ids_of(i, 20) for i in range(3)]
    logits = Sequences(backend).logits(dict(enumerate(tokens)))
    inputs = Sequences(backend).inputs(dict(enumerate(tokens)))
    rows = [
        SampleRow(17, RULES[2], tokens[0][:10], tokens[0][10:18], draft_ids=tokens[0][18:]),
        SampleRow(39, RULES[3], tokens[1], []),
        SampleRow(56, RULES[6], tokens[2][:12], tokens[2][12:17], draft_ids=tokens[2][17:]),
    ]
    inputs.samples = rows
    found = [one.token_id for one in backend.step(inputs).sampled if one is not None]
    assert found == draw([*logits[0][17:], logits[1][19], *logits[2][16:]], single_rows(rows))


@pytest.mark.parametrize("instruction_set", SETS)
def test_the_head_may_follow_a_part_of_the_layers(tmp_path: Path, instruction_set: str) -> None:
    """The same as a model of these layers alone; KV of later layers is left as it was."""
    path = make_rand_model(tmp_path / "whole", 5, layers=3)
    backend = load(path, instruction_set=instruction_set)
    whole, ids = Sequences(backend), ids_of(1, 40)
    expected = whole.logits({0: ids})[0]
    for layers in (1, 2, 1):
        alone = Sequences(load(first_layers(path, tmp_path / str(layers), layers), instruction_set=instruction_set))
        inputs = whole.inputs({1: ids})
        whole.computed[1] = 0
        inputs.layers, inputs.samples = layers, [SampleRow(i, RULES[1], ids[: i + 1], []) for i in range(40)]
        other = alone.inputs({1: ids})
        other.samples = [SampleRow(i, RULES[1], ids[: i + 1], []) for i in range(40)]
        assert backend.step(inputs).sampled == alone.backend.step(other).sampled
    assert np.array_equal(whole.logits({0: [5]})[0], Sequences(backend).logits({0: [*ids, 5]})[0][-1:])
    assert np.array_equal(Sequences(backend).logits({0: ids})[0], expected)
