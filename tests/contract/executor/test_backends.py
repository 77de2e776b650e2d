"""The core with each backend on M-rand: whatever the batch, chunks, resumption or prefix, the same tokens."""

import json
import random

import pytest
import torch

from services.executor import bench as engine_bench
from services.executor.batch import StepLimits
from services.executor.loader import LoadedModel, make_loader
from services.executor.settings import ExecutorSettings
from services.executor.warmup import warm_up
from tests.fixtures.models import make_rand_model, reference_generate
from tests.triton_device import DEVICE
from tests.unit.executor.conftest import Bench, make_bench
from tests.unit.executor.plans import state, tokens_by_sequence

COUNT = 10
BLOCK_SIZES = {"torch": 4, "cpu": 32, "cuda": 16}
SLOW = {"cuda"} if DEVICE.type == "cpu" else set()
"""Backends whose kernels are interpreted: they get a layer, fewer prompts and fewer tokens."""


@pytest.fixture(scope="module", params=BLOCK_SIZES)
def kind(request) -> str:
    """The backend's name."""
    return request.param


@pytest.fixture(scope="module")
def count(kind) -> int:
    """Of output tokens."""
    return 2 if kind in SLOW else COUNT


@pytest.fixture(scope="module")
def path(tmp_path_factory, kind):
    torch.set_num_threads(1)
    return make_rand_model(tmp_path_factory.mktemp("rand"), 3, layers=1 if kind in SLOW else 2)


@pytest.fixture(scope="module")
def model(path, kind) -> LoadedModel:
    asked = {"backend": kind, "block_size": BLOCK_SIZES[kind], "kv_blocks": 96, "max_sequences": 8}
    loaded = make_loader(ExecutorSettings.model_validate(asked | {"dtype": "fp32", "threads": 1}))("rand", str(path))
    assert loaded.backend.name == kind
    warm_up(loaded.backend, loaded.shape, 64, loaded.backend.spec.context_length)
    return loaded


@pytest.fixture
def bench(model) -> Bench:
    made = make_bench(StepLimits(sequences=8, tokens=64))
    made.loop.backend = model.backend
    made.core.set_model(model.limits)
    return made


def prompts_of(count):
    draw = random.Random(1)
    return [[draw.randrange(256) for _ in range(draw.randrange(2, 25))] for _ in range(count)]


def run_all(bench, prompts, limit, count, *, first=0, **options):
    """Each prompt's output; sequence i holds blocks of its own."""
    entering = [
        state(first + i, prompt, range(10 * i, 10 * i + 10), max_tokens=count, ignore_eos=True, **options)
        for i, prompt in enumerate(prompts)
    ]
    bench.take(enter=entering, grants=[(entry.sequence_id, limit, 60) for entry in entering])
    found = tokens_by_sequence(bench.run())
    return [found[first + i] for i in range(len(prompts))]


def test_greedy_equals_the_uncached_reference(bench, kind, path, count):
    prompts = prompts_of(2 if kind in SLOW else 8)
    assert run_all(bench, prompts, 5, count) == [reference_generate(path, prompt, count) for prompt in prompts]


def test_seeded_output_is_the_same_alone_in_chunks_and_resumed(bench, kind, count):
    prompts = [min(prompts_of(6), key=len)] if kind in SLOW else prompts_of(6)
    rule = {"temperature": 1.0, "top_p": 0.9, "seed": 17, "repetition_penalty": 1.1}
    together, before = run_all(bench, prompts, 64, count, **rule), min(4, count - 1)
    for i, prompt in enumerate(prompts):
        assert run_all(bench, [prompt], 3, count, first=100 + i, **rule) == [together[i]]
        resumed = state(
            200 + i, prompt, range(40, 50), output=together[i][:before], max_tokens=count, ignore_eos=True, **rule
        )
        bench.take(enter=[resumed], grants=[(200 + i, 7, 60)])
        assert tokens_by_sequence(bench.run())[200 + i] == together[i][before:]


def test_b2_choices_of_one_seed_differ(bench, count):
    entering = []
    for choice in range(4):
        entry = state(
            choice, [1, 2, 3], range(10 * choice, 10 * choice + 10), seed=7, temperature=1.0, max_tokens=count
        )
        entry.choice = choice
        entering.append(entry)
    bench.take(enter=entering, grants=[(choice, 64, 60) for choice in range(4)])
    assert len({tuple(tokens) for tokens in tokens_by_sequence(bench.run()).values()}) == 4


def test_a_cached_prefix_gives_the_same_answer(bench, model, path, count):
    size = model.shape.block_size
    prompt = (prompts_of(1)[0] * size)[: 2 * size + size // 2]
    run_all(bench, [prompt], 64, count)
    entering = state(9, prompt, [0, 1, *range(60, 80)], computed=2 * size, max_tokens=count, ignore_eos=True)
    bench.take(enter=[entering], grants=[(9, 64, 60)])
    assert tokens_by_sequence(bench.run())[9] == reference_generate(path, prompt, count)


def test_prompt_logprobs_do_not_depend_on_chunks(bench, kind):
    prompt = prompts_of(3)[2]
    seen = []
    for number, limit in enumerate((64, 8 if kind in SLOW else 3)):
        bench.take(
            enter=[state(number, prompt, range(10), max_tokens=1, prompt_logprobs=2)], grants=[(number, limit, 60)]
        )
        parts = [part.prompt for message in bench.run() for part in message.logprobs if part.prompt.chosen]
        seen.append([value for part in parts for value in part.chosen])
    assert len(seen[0]) == len(prompt) - 1
    # Without fixed splits, the cuda backend's last bits follow the batch.
    assert seen[0] == (pytest.approx(seen[1], abs=1e-4) if kind == "cuda" else seen[1])
    assert all(value < 0 for value in seen[0])


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make_rand_model(tmp_path_factory.mktemp("rand"), 3)


@pytest.mark.parametrize(
    "backend", [*sorted(BLOCK_SIZES.keys() - SLOW), *(pytest.param(x, marks=pytest.mark.full) for x in SLOW)]
)
def test_engine_benchmark_ends_with_one_json_line(small, capsys, backend):
    flags = ["--backend", backend, "--threads", "1", "--batch", "1,3", "--prompt", "9", "--output", "4"]
    assert engine_bench.main(["--model", str(small), *flags]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["backend"] == backend
    assert [point["batch"] for point in report["points"]] == [1, 3]
    assert all(point["prefill_tok_s"] > 0 and point["decode_tok_s"] > 0 for point in report["points"])


def test_engine_benchmark_refuses_what_cannot_run(small, capsys):
    assert engine_bench.main(["--model", str(small / "missing")]) == 1
    assert engine_bench.main(["--model", str(small), "--batch", "1", "--prompt", "5000", "--threads", "1"]) == 1
    assert "context" in capsys.readouterr().err
