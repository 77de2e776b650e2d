"""Formats by age in the core, with the fake backend: block tables change exactly where plans say."""

from dataclasses import replace

import pytest

from services.common.errors import QuireError, Reason
from services.common.kv_policy import KvPolicy
from services.executor.batch import StepLimits
from tests.unit.executor.aged import Ages, demotion
from tests.unit.executor.conftest import Bench, make_bench
from tests.unit.executor.fake_backend import SPEC, FakeBackend, generate, loaded
from tests.unit.executor.plans import blocks, ends, plan, state, tokens_by_sequence

POLICY = KvPolicy.parse("hot:30,int8:160,int4")
BLOCKS = 400
INT8, INT4 = BLOCKS, 2 * BLOCKS
"""The first ids of both colder pools; a block has 4 slots."""


class RecordingBackend(FakeBackend):
    """Knows what each step read."""

    def __init__(self) -> None:
        super().__init__(replace(SPEC, context_length=1024))
        self.read: list[tuple[int, int, list[int]]] = []  # first token, end, block table; per sequence and step

    def step(self, inputs):
        starts = inputs.query_starts
        for row, (end, table) in enumerate(zip(inputs.context_lengths, inputs.block_tables, strict=True)):
            self.read.append((int(end - starts[row + 1] + starts[row]), int(end), table.tolist()))
        return super().step(inputs)


@pytest.fixture
def bench() -> Bench:
    made = make_bench(StepLimits(sequences=8, tokens=512))
    made.backend = made.loop.backend = RecordingBackend()
    made.core.set_model(loaded(made.backend, blocks=BLOCKS, policy=POLICY).limits)
    return made


@pytest.fixture
def ages(bench: Bench) -> Ages:
    return Ages(loaded(RecordingBackend(), blocks=BLOCKS, policy=POLICY).limits, POLICY)


def check_reads(bench: Bench, ages: Ages) -> None:
    for first, end, table in bench.backend.read:
        ages.check(table, first, end)


def prompt_of(count: int) -> list[int]:
    return [(7 * i + 3) % 97 for i in range(count)]


@pytest.mark.parametrize("limit", [1, 16, 64, 100, 512])
def test_every_token_reads_what_its_length_prescribes(bench, ages, limit):
    prompt = prompt_of(390)
    bench.take(
        enter=[state(1, prompt, ages.hot(420), max_tokens=25)],
        grants=[(1, limit, 500)],
        demotions=ages.demotions(1, 0, 420),
    )
    assert tokens_by_sequence(bench.run())[1] == generate(prompt, 25)
    check_reads(bench, ages)
    assert {pool for _, _, table in bench.backend.read for pool in map(ages.limits.pool_of, table)} == {0, 1, 2}
    assert sum(map(sum, bench.backend.batches)) == 390 + 24
    assert max(map(sum, bench.backend.batches)) == min(limit, 128)


def test_only_a_pending_change_cuts_a_chunk(bench, ages):
    bench.take(
        enter=[state(1, prompt_of(400), ages.hot(401), max_tokens=1)],
        grants=[(1, 512, 9)],
        demotions=ages.demotions(1, 0, 128),
    )
    bench.run()
    assert bench.backend.batches == [[128], [272]]


def test_neighbours_change_each_at_its_own_length(bench, ages):
    prompts = {i: prompt_of(90 + 40 * i) for i in range(1, 6)}
    bench.take(
        enter=[state(i, prompt, ages.hot(len(prompt) + 20), max_tokens=20) for i, prompt in prompts.items()],
        grants=[(i, 48, 100) for i in prompts],
        demotions=[one for i, prompt in prompts.items() for one in ages.demotions(i, 0, len(prompt) + 20)],
    )
    assert tokens_by_sequence(bench.run()) == {i: generate(prompt, 20) for i, prompt in prompts.items()}
    assert max(map(len, bench.backend.batches)) > 1
    check_reads(bench, ages)


def test_demotions_come_with_the_slots_that_reach_beyond_them(bench, ages):
    prompt = prompt_of(100)
    bench.take(enter=[state(1, prompt, ages.hot(128), max_tokens=200)], grants=[(1, 512, 300)])
    sent = bench.run()
    bench.take(append=[{"sequence_id": 1, "blocks": blocks(*ages.hot(128))}], demotions=ages.demotions(1, 0, 256))
    sent += bench.run()
    bench.take(append=[{"sequence_id": 1, "blocks": blocks(*ages.hot(128))}], demotions=ages.demotions(1, 256, 384))
    sent += bench.run()
    assert tokens_by_sequence(sent)[1] == generate(prompt, 200)
    check_reads(bench, ages)


@pytest.mark.parametrize("computed", [128, 256, 300])
def test_a_found_prefix_is_brought_to_its_ages_before_the_first_step(bench, ages, computed):
    prompt, table = prompt_of(330), ages.hot(340)
    bench.take(enter=[state(1, prompt, table, max_tokens=1)], grants=[(1, 512, 9)])
    bench.run()
    bench.backend.read.clear()
    found = table[: computed // 4]
    bench.take(
        enter=[state(2, prompt, found + ages.hot(340 - computed), computed=computed, max_tokens=9)],
        grants=[(2, 512, 30)],
        demotions=[*ages.at_entry(2, computed), *ages.demotions(2, computed, 340)],
    )
    assert tokens_by_sequence(bench.run())[2] == generate(prompt, 9)
    assert bench.backend.read[0][0] == computed
    check_reads(bench, ages)


def test_colder_blocks_may_enter_and_ready_copies_are_not_written(bench):
    prompt = prompt_of(140)
    bench.take(
        enter=[state(1, prompt, range(36), max_tokens=1)],
        grants=[(1, 512, 9)],
        demotions=[demotion(1, 128, [(1, INT8 + 5), (2, INT8 + 6)])],
    )
    bench.run()
    assert bench.backend.demotions == [(1, INT8 + 5), (2, INT8 + 6)]
    bench.take(
        enter=[state(2, prompt, [0, INT8 + 5, *range(2, 32), *range(40, 50)], computed=128, max_tokens=5)],
        grants=[(2, 512, 9)],
        demotions=[demotion(2, 128, [(2, INT8 + 6)], writes=False)],
    )
    assert tokens_by_sequence(bench.run())[2] == generate(prompt, 5)
    assert bench.backend.read[-1][2][:4] == [0, INT8 + 5, INT8 + 6, 3]
    assert len(bench.backend.demotions) == 2


def test_int4_is_written_from_int8_at_the_same_length(bench):
    bench.take(
        enter=[state(1, prompt_of(130), range(40), max_tokens=1)],
        grants=[(1, 512, 9)],
        demotions=[demotion(1, 128, [(3, INT8)]), demotion(1, 128, [(3, INT4)])],
    )
    bench.run()
    assert bench.backend.demotions == [(3, INT8), (INT8, INT4)]


def test_a_change_at_the_length_computed_so_far_still_comes_in_time(bench):
    prompt = prompt_of(128)
    bench.take(enter=[state(1, prompt, range(32), max_tokens=5)], grants=[(1, 128, 9)])
    sent = bench.run()
    bench.take(append=[{"sequence_id": 1, "blocks": blocks(50, 51)}], demotions=[demotion(1, 128, [(4, INT8 + 1)])])
    sent += bench.run()
    assert tokens_by_sequence(sent)[1] == generate(prompt, 5)
    assert bench.backend.read[-1][2][4] == INT8 + 1


def test_what_a_copy_overwrites_is_no_longer_known(bench):
    bench.take(sealed=[{"block_id": INT8, "key": b"k" * 32}, {"block_id": INT8 + 1, "key": b"l" * 32}])
    bench.take(
        enter=[state(1, prompt_of(130), range(40), max_tokens=1)],
        grants=[(1, 512, 9)],
        demotions=[demotion(1, 128, [(3, INT8)])],
    )
    bench.run()
    assert [block.block_id for block in bench.core.inventory.to_sealed_blocks()] == [INT8 + 1]


def test_an_end_forgets_what_lies_ahead(bench):
    bench.take(
        enter=[state(1, prompt_of(100), range(40), max_tokens=90)],
        grants=[(1, 512, 9)],
        demotions=[demotion(1, 128, [(3, INT8)])],
    )
    bench.run()
    bench.take(ended_sequence_ids=[1], demotions=[demotion(1, 128, [(4, INT8)]), demotion(9, 128, [(4, INT8)])])
    bench.run()
    assert not bench.core.sequences
    assert bench.backend.demotions == []


@pytest.mark.parametrize(
    "broken",
    [
        {"group_id": 1},
        {"writes": []},
        {"block_ids": [INT8, INT8 + 1]},
        {"block_ids": [3 * BLOCKS]},
        {"block_ids": [-1]},
    ],
)
def test_malformed_demotions_end_the_stream(bench, broken):
    fields = {"sequence_id": 1, "at_length": 128, "positions": [3], "block_ids": [INT8], "writes": [True]}
    entering = state(1, prompt_of(100), range(40))
    with pytest.raises(QuireError) as refused:
        bench.core.take(plan(bench.core.epoch, 1, enter=[entering], demotions=[fields | broken]))
    assert refused.value.reason is Reason.PROTOCOL
    assert not bench.core.sequences


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ([demotion(1, 100, [(3, INT8)])], "at_length"),  # not where views change
        ([demotion(1, 0, [(0, INT8)])], "at_length"),  # behind what is computed
        ([demotion(1, 256, [(3, INT8)]), demotion(1, 128, [(4, INT8 + 1)])], "at_length"),
        ([demotion(1, 128, [(32, INT8)])], "positions"),  # written from there on
        ([demotion(1, 256, [(40, INT8)])], "positions"),  # beyond the table
        ([demotion(1, 128, [(-1, INT8)])], "positions"),
        ([demotion(1, 128, [(3, 45)])], "block_ids"),  # hot again
        ([demotion(1, 128, [(3, INT4)])], "block_ids"),  # int4 is made of int8
        ([demotion(1, 128, [(3, INT8)]), demotion(1, 256, [(3, INT8 + 1)])], "block_ids"),
    ],
)
def test_demotions_that_fit_no_sequence_end_it_alone(bench, wrong, field):
    bench.take(
        enter=[state(i, prompt_of(60), range(40 * i, 40 * i + 40), max_tokens=3) for i in (1, 2)],
        grants=[(i, 20, 1) for i in (1, 2)],
    )
    sent = bench.run()
    bench.take(grants=[(i, 512, 9) for i in (1, 2)], demotions=wrong)
    sent += bench.run()
    ended = ends(sent)
    assert ended[1].error.reason == Reason.INVALID_FIELD.name
    assert f"demotions.{field}" in ended[1].error.message
    assert tokens_by_sequence(sent)[2] == generate(prompt_of(60), 3)


def test_what_a_step_will_write_must_be_hot(bench):
    bench.take(enter=[state(1, prompt_of(10), [0, 1, INT8], computed=8), state(2, prompt_of(10), [4, 5, 6])])
    bench.take(append=[{"sequence_id": 2, "blocks": blocks(INT8 + 1)}])
    ended = ends(bench.run())
    assert {ended[i].error.reason for i in (1, 2)} == {Reason.INVALID_FIELD.name}
