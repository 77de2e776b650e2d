"""Moves between tiers where room is short, or where they are of no use."""

from __future__ import annotations

import pytest

from services.common.kv_policy import KvPolicy
from services.kvmanager.placement import Outcome
from tests.unit.kvmanager.sim_executor import spec
from tests.unit.kvmanager.test_moves import PROMPT, assert_sound, made, serve, under_way
from tests.unit.kvmanager.world import World


def test_nothing_moves_where_formats_change_with_age() -> None:
    """A copy of every age would have to come up for one prefix: what moved down would be lost."""
    policy = KvPolicy.parse("hot:128,int8:256,int4")
    world = World(spec("e", policy, (30, 16, 18), disk=10))
    for token in range(1, 6):
        serve(world, [token] * 330)
    world.move_all()
    assert under_way(world) == []
    serve(world, PROMPT)
    assert_sound(world)
    world.finish()


@pytest.mark.parametrize("device", [10, 11, 12, 16])
def test_a_small_pool_never_waits_for_itself(device: int) -> None:
    """Moves hold blocks; a prompt that fills the pool is answered once they are over."""
    world = made(device=device, disk=60)
    for token in range(1, 6):
        sequence_id = world.reserve([token] * 300, "e")
        for _ in range(6):
            if sequence_id in world.stays:
                break
            world.move_all()
            world.settle()
            if sequence_id not in world.asked and sequence_id not in world.stays:
                sequence_id = world.reserve([token] * 300, "e")
        assert sequence_id in world.stays
        world.go_on(sequence_id, 300)
        world.end(sequence_id)
        world.settle()
        world.release(sequence_id)
        assert_sound(world)
    world.finish()


def test_an_extension_makes_room_in_the_epoch_of_its_sequence() -> None:
    world = made()
    serve(world, [2] * 330)
    serve(world, [3] * 330)
    world.move_all()
    sequence_id = world.reserve([1] * 20, "e", lookahead=12)
    world.settle()
    assert world.session is not None
    world.manager.report("e", 2, [1])  # its epoch is over before the scheduler knows
    answer = world.manager.extend(world.session, sequence_id, 600)
    assert answer is not None
    assert answer.outcome == Outcome.GRANTED
    assert under_way(world) == []  # no plan would carry them
    assert_sound(world)
