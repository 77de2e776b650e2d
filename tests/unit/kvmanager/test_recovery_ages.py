"""Sequences with formats by age, stated again: what changed before, and what is still to change."""

from __future__ import annotations

import pytest

from services.kvmanager.reservations import Demoted
from tests.unit.kvmanager.helpers import manager
from tests.unit.kvmanager.sim_executor import spec
from tests.unit.kvmanager.test_recovery import POLICY, books, lost, restated
from tests.unit.kvmanager.world import World


def aged() -> tuple[World, int]:
    """A sequence of 640 tokens, with applied and with pending changes."""
    world = World(spec("e", POLICY, (60, 40, 40)))
    sequence_id = world.reserve([1] * 500, "e")
    for _ in range(5):
        world.go_on(sequence_id, 128)
    stay = world.stays[sequence_id]
    assert any(change.length < stay.computed for change in stay.demotions)
    assert any(change.length >= stay.computed for change in stay.demotions)
    return world, sequence_id


def go_on_and_end(world: World, *sequence_ids: int) -> None:
    """The executor checks all that it reads."""
    for sequence_id in sequence_ids:
        assert not world.stays[sequence_id].leaving
        before = world.stays[sequence_id].executor.running[sequence_id].computed
        world.go_on(sequence_id, 150)
        world.go_on(sequence_id, 150)
        assert world.stays[sequence_id].executor.running[sequence_id].computed > before
    assert world.manager.verify() == []
    world.finish()


@pytest.mark.parametrize("with_inventory", [True, False])
def test_changes_made_and_to_come_are_held_again_after_a_restart(with_inventory: bool) -> None:
    world, sequence_id = aged()
    held = [p.blocks.leased_count for p in world.manager.executors["e"].pools]
    if not with_inventory:
        world.executors["e"].inventory.clear()
    world.restart_kvmanager()
    world.register(world.executors["e"])
    world.open_stream()
    world.settle()
    assert [p.blocks.leased_count for p in world.manager.executors["e"].pools] == held
    go_on_and_end(world, sequence_id)


def test_a_stream_that_missed_answers_is_taken_at_its_schedulers_word() -> None:
    world, sequence_id = aged()
    world.extend(sequence_id, 256)
    world.break_stream()
    world.open_stream()
    world.settle()
    go_on_and_end(world, sequence_id)


@pytest.mark.parametrize("writer_first", [True, False])
@pytest.mark.parametrize("with_inventory", [True, False])
def test_shared_copies_are_shared_again_in_any_order(writer_first: bool, with_inventory: bool) -> None:
    world, first = aged()
    second = world.reserve([1] * 600, "e")
    world.settle()
    assert world.stays[second].computed == 480
    assert any(block >= 60 for block in world.stays[second].blocks)  # a table that begins with colder blocks
    held = [p.blocks.leased_count for p in world.manager.executors["e"].pools]
    if not with_inventory:
        world.executors["e"].inventory.clear()
    world.restart_kvmanager()
    world.register(world.executors["e"])
    if not writer_first:
        world.stays = dict(reversed(world.stays.items()))
    world.open_stream()
    world.settle()
    assert [p.blocks.leased_count for p in world.manager.executors["e"].pools] == held
    go_on_and_end(world, first, second)


def test_an_executor_may_be_further_than_its_scheduler_knows() -> None:
    world, sequence_id = aged()
    world.stays[sequence_id].executor.compute(sequence_id, 200)
    world.restart_kvmanager()
    world.open_stream()
    world.register(world.executors["e"])
    world.settle()
    world.hear_results(sequence_id)
    go_on_and_end(world, sequence_id)


@pytest.mark.parametrize(
    "demotions",
    [
        (Demoted(0, 256, [0], [40], [True]),),  # a first block stays hot
        (Demoted(0, 256, [20], [40], [True]),),  # beyond the table
        (Demoted(0, 256, [-1], [40], [True]),),
        (Demoted(0, 256, [8], [40], [True]),),  # not full at that length
        (Demoted(0, 256, [1], [2], [True]),),  # hot is not colder
        (Demoted(0, 256, [1], [40], [True]), Demoted(0, 384, [1], [41], [True])),  # warm twice
        (Demoted(0, 256, [1, 2], [40, 40], [True, True]),),
        (Demoted(0, 256, [1, 1], [60, 40], [True, True]),),
        (Demoted(0, 256, [1], [99], [True]),),
        (Demoted(0, 512, [12], [40], [False]),),  # a ready copy of tokens that are not known
    ],
    ids=str,
)
def test_changes_that_cannot_be_are_refused(demotions: tuple[Demoted, ...]) -> None:
    made, session = manager(spec("e", POLICY, (40, 20, 20)))
    before = books(made)
    wrong = restated(tokens=400, computed=300, blocks=tuple(range(16)), kv_policy=str(POLICY), demotions=demotions)
    made.restate(session, wrong)
    assert [sequence_id for sequence_id, _ in lost(made)] == [1]
    assert books(made) == before


def test_a_colder_block_where_nothing_is_computed_is_refused() -> None:
    made, session = manager(spec("e", POLICY, (40, 20, 20)))
    for position in (0, 9, 15):
        blocks = [*range(16)]
        blocks[position] = 45
        made.restate(session, restated(tokens=400, computed=300, blocks=tuple(blocks), kv_policy=str(POLICY)))
    assert [sequence_id for sequence_id, _ in lost(made)] == [1, 1, 1]
    assert made.executors["e"].pools[1].blocks.leased_count == 0
