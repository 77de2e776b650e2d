"""A draft model beside its target: exact whatever it says, in step whatever happens, refused where it cannot help."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from quire.v1 import executor_pb2
from services.common.errors import QuireError
from services.executor.batch import StepLimits
from services.executor.description import describe_loaded
from services.executor.loader import LoadedModel, make_loader
from services.executor.numa import PoolPlace
from services.executor.settings import ExecutorSettings
from services.executor.speculation.draft import DraftProposer
from services.executor.speculation.proposer import DraftRequest
from services.executor.warmup import warm_up
from tests.fixtures.models import make_rand_model, make_succ_model
from tests.fixtures.vocabularies import byte_level
from tests.unit.executor.conftest import Bench, make_bench
from tests.unit.executor.plans import ends, state, tokens_by_sequence

BLOCK_SIZES = {"torch": 4, "cpu": 32}
BLOCKS = 200
EACH = 24
LENGTH = 20
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 4, "repetition_penalty": 1.1}


def load(path: Path, draft: Path, backend: str) -> LoadedModel:
    asked = {"backend": backend, "block_size": BLOCK_SIZES[backend], "kv_blocks": BLOCKS, "draft": str(draft)}
    loaded = make_loader(ExecutorSettings.model_validate(asked | {"dtype": "fp32", "threads": 1}))("rand", str(path))
    warm_up(loaded.backend, loaded.shape, 64, loaded.backend.spec.context_length, loaded.proposer)
    return loaded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("draft")


@pytest.fixture(scope="module")
def path(folder: Path) -> Path:
    return make_rand_model(folder / "target", 3)


@pytest.fixture(scope="module", params=BLOCK_SIZES)
def good(path: Path, request: pytest.FixtureRequest) -> LoadedModel:
    return load(path, path, request.param)


@pytest.fixture(scope="module")
def bad(folder: Path, path: Path, good: LoadedModel) -> LoadedModel:
    other = make_rand_model(folder / "other", 8, hidden=32, heads=2, kv_heads=1, layers=1)
    return load(path, other, good.backend.name)


def bench_of(model: LoadedModel, tokens: int = 80) -> Bench:
    bench = make_bench(StepLimits(sequences=8, tokens=tokens))
    assert model.draft is not None
    bench.loop.backend, bench.loop.proposer, bench.loop.draft_backend = (
        model.backend,
        model.proposer,
        model.draft.backend,
    )
    bench.core.set_model(model.limits, (), model.draft.cache)
    return bench


def prompt_of(length: int, seed: int = 5) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(length)]


def prompts_of(count: int) -> list[list[int]]:
    return [prompt_of(length, length) for length in random.Random(count).choices(range(2, 30), k=count)]


def entering(number: int, prompt: list[int], **options) -> executor_pb2.SequenceState:
    ids = range(EACH * (number % 8), EACH * (number % 8 + 1))
    drafts = [BLOCKS - 1 - i for i in ids]  # other ids: the groups have nothing to do with each other
    wanted = {"max_tokens": LENGTH, "ignore_eos": True, "draft_blocks": drafts} | options
    return state(number, prompt, ids, **wanted)


def run(model: LoadedModel, prompts: list[list[int]], limits: list[int], **rule) -> tuple[dict, float]:
    """Outputs, and the share of drafts that was accepted."""
    bench = bench_of(model)
    states = [entering(i, prompt, **rule) for i, prompt in enumerate(prompts)]
    grants = [(i, 9, -(-len(prompt) // 9)) for i, prompt in enumerate(prompts)]
    grants += [(i, 1, 1, limit) for limit in limits for i in range(len(prompts))]
    bench.take(enter=states, grants=grants)
    sent = bench.run()
    assert len(ends(sent)) == len(prompts)
    return tokens_by_sequence(sent), share(sent)


def share(sent: list) -> float:
    proposed = sum(sum(message.proposed_counts) for message in sent)
    return sum(sum(message.accepted_counts) for message in sent) / proposed if proposed else 0.0


@pytest.mark.parametrize("rule", [{}, SAMPLED], ids=str)
def test_g2_answers_are_those_of_plain_decoding(good: LoadedModel, bad: LoadedModel, rule: dict[str, float]) -> None:
    """A copy of the target is always right, for it draws with the same noise; another model hardly ever is."""
    prompts = prompts_of(6)
    plain, _ = run(good, prompts, [0] * LENGTH, **rule)
    for model, least, most in ((good, 1.0, 1.0), (bad, 0.0, 0.5)):
        for limits in ([1] * LENGTH, [5] * LENGTH, random.Random(2).choices([0, 0, 3, 8], k=LENGTH)):
            found, accepted = run(model, prompts, limits, **rule)
            assert found == plain
            assert least <= accepted <= most


def test_g7_after_a_time_without_drafts_it_catches_up(good: LoadedModel) -> None:
    """The draft model computed nothing meanwhile; and the next to share the prompt takes what it computed then."""
    bench = bench_of(good)
    prompt = prompt_of(70)
    bench.take(enter=[entering(0, prompt, max_tokens=60)], grants=[(0, 80, 1), (0, 1, 12), (0, 1, 60, 4)])
    sent = bench.run()
    assert share(sent) == 1.0
    plain = tokens_by_sequence(sent)[0]
    shared = 64 if good.backend.name == "cpu" else 68
    again = entering(0, prompt, max_tokens=60, computed=shared)
    again.sequence_id = 9
    bench.take(enter=[again], grants=[(9, 80, 1), (9, 1, 60, 4)])
    sent = bench.run()
    assert share(sent) == 1.0
    assert tokens_by_sequence(sent)[9] == plain


def test_a_long_text_is_caught_up_with_over_several_steps(good: LoadedModel) -> None:
    """In steps no longer than the executor's own; what is not proposed meanwhile is told apart, and so is the time."""
    bench = bench_of(good)
    assert good.draft is not None
    drafter = DraftProposer(good.draft.backend, good.draft.cache, "", 16)
    bench.loop.proposer, computed = drafter, []
    own = drafter.catch_up

    def catch_up(requests: Sequence[DraftRequest]) -> list[bool]:
        before = [good.draft.cache.computed(request.sequence) for request in requests]
        ready = own(requests)
        computed.append(sum(good.draft.cache.computed(request.sequence) for request in requests) - sum(before))
        return ready

    drafter.catch_up = catch_up
    prompts = [prompt_of(40, i) for i in range(2)]
    bench.take(
        enter=[entering(i, prompt) for i, prompt in enumerate(prompts)],
        grants=[grant for i in range(2) for grant in ((i, 40, 1), (i, 1, LENGTH, 3))],
    )
    sent = bench.run()
    assert tokens_by_sequence(sent) == run(good, prompts, [0] * LENGTH)[0]
    proposed = [count for message in sent for count in message.proposed_counts]
    behind = [is_behind for message in sent for is_behind in message.behind or [False] * len(message.proposed_counts)]
    assert True in behind
    assert not any(count for is_behind, count in zip(behind, proposed, strict=True) if is_behind)
    assert proposed.count(0) - sum(behind) <= len(prompts)  # of each the last step, which has no room
    assert max(proposed) == 3
    assert max(computed) == 16
    assert sum(message.timings.catch_up_seconds for message in sent) > 0
    assert share(sent) == 1.0


def test_g6_past_the_drafts_context_one_request_decodes_plainly(folder: Path, path: Path) -> None:
    short = make_rand_model(folder / "short", 3, context_length=32)  # the target's weights
    model = load(path, short, "cpu")
    bench = bench_of(model)
    long, other = prompt_of(20), [7, 8]
    bench.take(
        enter=[entering(0, long, max_tokens=30), entering(1, other, max_tokens=25)],
        grants=[(0, 80, 1), (1, 80, 1), (0, 1, 30, 4), (1, 1, 30, 4)],
    )
    sent = bench.run()
    by_sequence: dict[int, list[int]] = {0: [], 1: []}
    for message in sent:
        counts = list(message.proposed_counts)
        for number, count in zip(message.sequence_ids, message.draft_step_counts, strict=bool(counts)):
            by_sequence[number] += counts[:count]
            del counts[:count]
    assert by_sequence[0][0] == 4
    assert by_sequence[0][-9:] == [0] * 9
    assert 0 not in by_sequence[1][:-1]
    plain = load(path, path, "cpu")
    assert tokens_by_sequence(sent)[0] == run(plain, [long], [0] * 40, max_tokens=30)[0][0]


def test_g6_another_vocabulary_is_refused_at_start(folder: Path, path: Path) -> None:
    larger = make_succ_model(folder / "larger", {}, [b"more"])
    renamed = make_rand_model(folder / "renamed", 3, vocabulary=byte_level([b"ab"]))
    for other in (larger, renamed):
        with pytest.raises(QuireError, match="vocabulary") as error:
            load(path, other, "cpu")
        assert error.value.reason.name == "MODEL_LOAD_FAILED"


def test_a_copied_block_is_copied_for_the_draft_as_well(good: LoadedModel) -> None:
    bench = bench_of(good)
    prompt = prompt_of(40)
    bench.take(enter=[entering(0, prompt)], grants=[(0, 80, 1), (0, 1, LENGTH, 4)])
    plain = tokens_by_sequence(bench.run())[0]
    size = good.shape.block_size
    last = 40 // size  # the block that is not full, or the next one
    copies = [
        executor_pb2.BlockOperation(
            operation_id=1 + group,
            kind=executor_pb2.BLOCK_OPERATION_KIND_COPY,
            phase=executor_pb2.BLOCK_OPERATION_PHASE_BEFORE,
            group_id=group,
            source_block_id=source,
            destination_block_id=destination,
            source_pool_id=group,
            destination_pool_id=group,
        )
        for group, source, destination in ((0, last, 100), (1, BLOCKS - 1 - last, 20))
    ]
    ids, drafts = list(range(EACH)), [BLOCKS - 1 - i for i in range(EACH)]
    ids[last], drafts[last] = 100, 20
    fork = state(1, prompt, ids, draft_blocks=drafts, computed=39, max_tokens=LENGTH, ignore_eos=True)
    bench.take(operations=copies, enter=[fork], grants=[(1, 80, 1), (1, 1, LENGTH, 4)])
    sent = bench.run()
    assert tokens_by_sequence(sent)[1] == plain
    assert share(sent) == 1.0
    assert {number for message in sent for number in message.done_operation_ids} == {1, 2}


def test_what_is_wrong_about_its_blocks_is_refused(good: LoadedModel) -> None:
    bench = bench_of(good)
    for number, drafts in ((0, [BLOCKS]), (1, [-1])):
        wrong = entering(number, [1, 2])
        wrong.blocks[1].block_ids[:] = drafts
        bench.take(enter=[wrong])
        assert ends(bench.run())[number].error.message.startswith("blocks")
    sealed = executor_pb2.SealedBlock(block_id=3, key=b"k" * 32, group_id=1)
    bench.take(sealed=[sealed])
    assert bench.core.sealed_blocks() == [sealed]


def test_says_what_it_has(good: LoadedModel) -> None:
    found = describe_loaded(
        "x", StepLimits(8, 80), good, warm_up(good.backend, good.shape, 64, 1024, good.proposer), PoolPlace(0, 10)
    )
    assert [(group.group_id, group.name) for group in found.groups] == [(0, "target"), (1, "draft")]
    assert [(pool.pool_id, pool.group_id, pool.block_count) for pool in found.pools] == [(0, 0, BLOCKS), (1, 1, BLOCKS)]
    assert found.speculation.proposer == "draft"
    assert found.speculation.draft_token_seconds > 0
