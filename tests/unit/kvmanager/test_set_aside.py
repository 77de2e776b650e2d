"""What a preempted sequence leaves goes to a lower tier at once."""

from __future__ import annotations

from services.common.kv_policy import HOT_ONLY
from services.kvmanager.moves import MoveKind
from tests.unit.kvmanager.sim_executor import spec
from tests.unit.kvmanager.test_moves import PROMPT, assert_sound, known, made, parked, under_way
from tests.unit.kvmanager.world import World


def set_aside(world: World, sequence_id: int) -> None:
    """As a scheduler that preempts a sequence."""
    assert world.session is not None
    world.end(sequence_id)
    world.settle()
    holding = world.session.holdings[sequence_id]
    world.release(sequence_id)
    holding.send_down()
    world.follow()


def test_what_comes_back_soon_goes_down_at_once_and_makes_room_as_it_arrives() -> None:
    """As after a preemption: nothing else would have moved, for most of the pool is free."""
    world = made(device=200)
    sequence_id = world.reserve(PROMPT, "e")
    world.go_on(sequence_id, len(PROMPT))
    pool = known(world).pools[0].blocks
    set_aside(world, sequence_id)
    world.settle()
    assert under_way(world) == [MoveKind.OFFLOAD] * 10
    assert known(world).moves.coming_count == 10
    assert pool.available_count == 190  # only what was not full is free already
    world.move_all()
    assert known(world).moves.coming_count == 0
    assert pool.available_count == 200
    assert known(world).pools[1].blocks.cached_count == 10
    parked(world)
    world.move_all()
    world.settle()
    assert_sound(world)
    world.finish()


def test_what_others_hold_stays_where_it_is() -> None:
    world = made(device=200)
    first = world.reserve(PROMPT, "e")
    world.go_on(first, len(PROMPT))
    second = world.reserve(PROMPT + [9] * 40, "e")
    world.settle()
    world.go_on(second, 100)
    set_aside(world, first)
    world.settle()
    assert under_way(world) == []
    assert_sound(world)
    world.finish()


def test_without_a_lower_tier_nothing_moves_however_soon_it_comes_back() -> None:
    world = World(spec("e", HOT_ONLY, (32,)))
    sequence_id = world.reserve(PROMPT, "e")
    world.go_on(sequence_id, len(PROMPT))
    set_aside(world, sequence_id)
    assert under_way(world) == []
    assert known(world).pools[0].blocks.cached_count == 10
