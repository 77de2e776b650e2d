"""Blocks on their way between tiers: what moves when, who waits for it, and what every kind of loss leaves behind."""

from __future__ import annotations

from services.common.kv_policy import HOT_ONLY
from services.kvmanager.executors import Executor, ExecutorSpec
from services.kvmanager.moves import MoveKind
from services.kvmanager.pools import PoolSpec
from tests.unit.kvmanager.helpers import LEASE, MODEL
from tests.unit.kvmanager.sim_executor import HOT, SIZE, spec
from tests.unit.kvmanager.world import World

PROMPT = [1] * 330  # ten full blocks


def made(device: int = 32, disk: int = 40) -> World:
    return World(spec("e", HOT_ONLY, (device,), disk=disk))


def known(world: World) -> Executor:
    return world.manager.executors["e"]


def serve(world: World, tokens: list[int]) -> None:
    """A sequence from its reservation to its release; its cached content stays. Moves are not done."""
    sequence_id = world.reserve(tokens, "e")
    world.go_on(sequence_id, len(tokens))
    assert sequence_id in world.stays
    world.end(sequence_id)
    world.settle()
    world.release(sequence_id)
    world.settle()


def cached_on_disk(world: World) -> World:
    """The prompt's blocks lie on the disk alone."""
    serve(world, PROMPT)
    token = 2
    while any(known(world).pools[0].index.find(key) is not None for key in keys(world)):
        serve(world, [token] * 200)  # no more than what is kept free: nothing is dropped
        world.move_all()
        token += 1
    assert all(known(world).pools[1].index.find(key) is not None for key in keys(world))
    return world


def keys(world: World) -> list[bytes]:
    """Of the prompt's blocks."""
    if not hasattr(world, "prompt_keys"):
        world.prompt_keys = [key for key, _ in known(world).pools[0].index.items()]  # type: ignore[attr-defined]
    return world.prompt_keys  # type: ignore[attr-defined, no-any-return]


def under_way(world: World) -> list[MoveKind]:
    return [move.kind for move in known(world).moves]


def assert_sound(world: World) -> None:
    assert world.manager.verify() == []


def parked(world: World, tokens: list[int] = PROMPT) -> int:
    """A reservation that waits for what comes up; the executor knows the moves."""
    sequence_id = world.reserve(tokens, "e")
    world.settle()
    assert set(under_way(world)) == {MoveKind.LOAD}
    assert len(world.manager.waiting) == 1
    return sequence_id


def test_content_moves_down_ahead_of_need() -> None:
    world = made()
    for token in range(1, 4):
        serve(world, [token] * 330)
    world.settle()
    assert under_way(world)
    assert set(under_way(world)) == {MoveKind.OFFLOAD}
    before = known(world).pools[0].blocks.free_count
    world.move_all()
    assert known(world).pools[0].blocks.free_count > before
    assert known(world).pools[1].blocks.cached_count > 0
    assert_sound(world)


def test_nothing_moves_where_there_is_room_or_no_lower_tier() -> None:
    world = made(device=200)
    serve(world, PROMPT)
    assert under_way(world) == []
    world = World(spec("e", HOT_ONLY, (32,)))
    for token in range(1, 5):
        serve(world, [token] * 330)
    assert under_way(world) == []


def test_a_reservation_waits_for_its_prefix_and_then_has_it() -> None:
    world = cached_on_disk(made())
    sequence_id = parked(world)
    assert under_way(world) == [MoveKind.LOAD] * 10
    world.move_all()
    world.settle()
    stay = world.stays[sequence_id]
    assert stay.computed == 10 * SIZE
    world.go_on(sequence_id, 50)  # the executor reads what came up, and checks it
    assert_sound(world)
    world.finish()


def test_two_who_want_the_same_bring_it_up_once() -> None:
    world = cached_on_disk(made())
    first = parked(world)
    second = world.reserve([*PROMPT, 5, 6, 7], "e")
    assert under_way(world) == [MoveKind.LOAD] * 10
    world.move_all()
    world.settle()
    assert world.stays[first].computed == world.stays[second].computed == 10 * SIZE
    world.finish()


def test_a_move_that_fails_leaves_the_prompt_to_be_computed_and_its_source_forgotten() -> None:
    world = cached_on_disk(made())
    sequence_id = parked(world)
    world.move_all(well=False)
    world.settle()
    assert world.stays[sequence_id].computed == 0
    assert all(known(world).pools[1].index.find(key) is None for key in keys(world))
    assert_sound(world)
    world.finish()


def test_a_block_that_fails_ends_the_prefix_there() -> None:
    world = cached_on_disk(made())
    sequence_id = parked(world)
    executor = world.executors["e"]
    fourth = next(i for i, move in executor.waiting.items() if move.key == keys(world)[3])
    executor.move(fourth, well=False)
    world.report(executor)
    world.move_all()
    world.settle()
    assert world.stays[sequence_id].computed == 3 * SIZE
    world.go_on(sequence_id, 400)
    world.finish()


def test_an_offload_that_fails_keeps_the_content_where_it_is() -> None:
    world = made()
    for token in range(1, 4):
        serve(world, [token] * 330)
    world.settle()
    count = len(known(world).pools[0].index)
    executor = world.executors["e"]
    for operation_id in list(executor.waiting):
        executor.move(operation_id, well=False)
    world.report(executor)
    assert len(known(world).pools[0].index) == count
    assert len(known(world).pools[1].index) == 0
    assert_sound(world)


def test_reports_that_come_late_twice_or_from_nowhere_change_nothing() -> None:
    world = cached_on_disk(made())
    parked(world)
    executor = world.executors["e"]
    ids = list(executor.waiting)
    world.move_all()
    before = [pool.blocks.snapshot() for pool in known(world).pools]
    world.manager.report("e", 1, [], ids, [])
    world.manager.report("e", 1, [], ids, ids)
    world.manager.report("e", 1, [], [999_999], [999_999])
    assert [pool.blocks.snapshot() for pool in known(world).pools] == before
    assert_sound(world)


def test_failures_count_only_among_what_is_over() -> None:
    world = cached_on_disk(made())
    parked(world)
    ids = list(world.executors["e"].waiting)
    world.manager.report("e", 1, [], [], ids)
    assert len(under_way(world)) == 10
    assert_sound(world)


def test_d2_a_frozen_executor_keeps_its_blocks_until_its_epoch_is_closed() -> None:
    """D2: cancelled in the middle of a load, a hundred times; held while a write may land, then all there again."""
    world = cached_on_disk(made(device=32, disk=40))
    executor = world.executors["e"]
    for _ in range(100):
        sequence_id = world.reserve(PROMPT, "e")
        world.settle()
        loads = [move for move in known(world).moves if move.kind == MoveKind.LOAD]
        assert loads
        assert world.session is not None
        world.manager.release(world.session, sequence_id)  # the client is gone
        world.asked.pop(sequence_id)
        assert known(world).pools[0].blocks.leased_count >= len(loads)
        late = list(executor.waiting)
        world.new_epoch(executor)
        assert known(world).pools[0].blocks.leased_count >= len(loads)  # not before it says so
        world.report(executor)
        assert under_way(world) == []
        assert [pool.blocks.leased_count for pool in known(world).pools] == [0, 0]
        world.manager.report("e", executor.epoch, executor.closed, late, [])  # ignored
        assert_sound(world)
    world.finish()


def test_an_executor_that_moves_nothing_is_not_waited_for() -> None:
    world = cached_on_disk(made())
    sequence_id = parked(world)
    world.pass_time(5.0)
    assert len(world.manager.waiting) == 1
    world.pass_time(5.0)
    world.settle()
    assert world.stays[sequence_id].computed == 0
    assert under_way(world).count(MoveKind.LOAD) == 10  # they may still land
    world.move_all()
    assert_sound(world)
    world.finish()


def test_an_epoch_that_ends_in_the_middle_leaves_the_source() -> None:
    world = cached_on_disk(made())
    parked(world)
    executor = world.executors["e"]
    world.new_epoch(executor)
    world.report(executor)
    assert all(known(world).pools[1].index.find(key) is not None for key in keys(world))
    assert not len(world.manager.waiting)  # of the older epoch: answered
    world.settle()
    assert world.asked == {}
    assert_sound(world)


def test_moves_of_an_epoch_travel_in_its_plans_only() -> None:
    """A move that went with plans of a newer epoch would be taken for over when the older one is closed."""
    world = cached_on_disk(made())
    world.reserve(PROMPT, "e")
    assert world.inbox  # the word of the moves is on its way
    executor = world.executors["e"]
    world.new_epoch(executor)
    world.settle()
    assert not executor.waiting
    world.report(executor)
    assert under_way(world) == []
    assert_sound(world)


def test_a_newer_epoch_that_a_scheduler_knows_first_is_that_of_its_moves() -> None:
    world = made()
    serve(world, PROMPT)
    serve(world, [2] * 330)
    world.move_all()
    executor = world.executors["e"]
    executor.new_epoch()  # the kvmanager has not heard of it
    serve(world, [3] * 330)
    assert {move.epoch for move in known(world).moves} <= {2}
    assert under_way(world)
    world.report(executor)  # epoch 1 is closed
    assert under_way(world)
    world.move_all()
    assert_sound(world)
    world.finish()


def test_a_replaced_executor_takes_its_moves_with_it() -> None:
    world = cached_on_disk(made())
    sequence_id = parked(world)
    late = list(world.executors["e"].waiting)
    world.manager.replace(world.executors["e"].spec, epoch=1).settle([])
    world.follow()
    world.settle()
    assert world.stays[sequence_id].computed == 0
    world.manager.report("e", 1, [], late, [])
    assert_sound(world)


def test_a_lost_executor_is_answered_for_and_its_moves_are_over_when_it_returns() -> None:
    world = cached_on_disk(made())
    parked(world)
    executor = world.executors["e"]
    world.unregister(executor)
    world.settle()
    assert world.asked == {}  # nothing is held there any more: the executor is forgotten
    for operation_id in list(executor.waiting):
        executor.move(operation_id, well=True)
    world.register(executor)
    assert_sound(world)
    sequence_id = world.reserve(PROMPT, "e")
    world.settle()
    assert world.stays[sequence_id].computed == 10 * SIZE  # they had come up meanwhile, as its inventory says
    world.finish()


def test_what_was_on_its_way_when_a_stream_broke_is_sent_again() -> None:
    world = cached_on_disk(made())
    world.reserve(PROMPT, "e")
    world.break_stream()  # before the scheduler heard of the moves
    assert len(under_way(world)) == 10
    world.open_stream()
    world.settle()
    assert len(world.executors["e"].waiting) == 10
    world.move_all()
    assert under_way(world) == []
    world.finish()


def test_what_was_sent_twice_is_done_once() -> None:
    world = cached_on_disk(made())
    parked(world)
    world.break_stream()
    world.open_stream()
    world.settle()
    executor = world.executors["e"]
    assert len(executor.waiting) == 10
    world.move_all()
    world.break_stream()
    world.open_stream()
    world.settle()
    assert not executor.waiting
    world.finish()


def test_a_lost_schedulers_moves_wait_for_their_reports() -> None:
    world = cached_on_disk(made())
    parked(world)
    world.break_stream()
    world.pass_time(2 * LEASE)
    assert len(under_way(world)) == 10
    executor = world.executors["e"]
    for operation_id in list(executor.waiting):
        executor.move(operation_id, well=True)
    world.report(executor)
    assert under_way(world) == []
    assert_sound(world)


def test_the_nearest_tier_is_asked_first_and_takes_what_falls() -> None:
    pools = (
        PoolSpec(0, 0, 1, HOT, (), 32, 0, SIZE),
        PoolSpec(1, 0, 3, HOT, (), 40, 100, SIZE),
        PoolSpec(2, 0, 2, HOT, (), 12, 200, SIZE),
    )
    world = World(ExecutorSpec("e", MODEL, pools))
    serve(world, PROMPT)
    prompt_keys = keys(world)
    for token in range(2, 5):
        serve(world, [token] * 330)
        world.settle()
        assert {m.destination.pool.spec.tier for m in known(world).moves if m.destination is not None} <= {2}
        world.move_all()
    host, disk = known(world).pools[2], known(world).pools[1]
    assert host.blocks.cached_count > 0
    assert disk.blocks.cached_count == 0
    assert_sound(world)
    sequence_id = world.reserve(PROMPT, "e")
    world.move_all()
    world.settle()
    found = sum(known(world).pools[0].index.find(key) is not None for key in prompt_keys)
    assert world.stays[sequence_id].computed <= found * SIZE
    world.finish()
