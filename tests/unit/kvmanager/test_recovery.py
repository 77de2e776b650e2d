"""Sequences stated again: after a restart of the kvmanager, on a new stream, truthfully and not."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from services.common.kv_policy import HOT_ONLY, KvPolicy
from services.kvmanager.executors import InventoryBlock
from services.kvmanager.holdings import Refused
from services.kvmanager.keys import KeySpace
from services.kvmanager.manager import KvManager
from services.kvmanager.placement import Outcome
from services.kvmanager.reservations import Demoted, GroupBlocks, Restated
from tests.unit.kvmanager.helpers import LEASE, MODEL, executor, ids, manager, only_executor, pool, reservation
from tests.unit.kvmanager.sim_executor import spec
from tests.unit.kvmanager.world import World

POLICY = KvPolicy.parse("hot:128,int8:256,int4")


def restated(
    sequence_id: int = 1,
    tokens: int = 10,
    computed: int = 6,
    blocks: tuple[int, ...] = (3, 4, 5),
    *,
    epoch: int = 1,
    name: str = "e",
    model: str = MODEL,
    kv_policy: str = "",
    demotions: tuple[Demoted, ...] = (),
) -> Restated:
    """Of tokens 0, 1, 2, ... in blocks of four."""
    key_space = KeySpace(model, "default", kv_policy)
    groups = [GroupBlocks(0, list(blocks))]
    return Restated(sequence_id, name, epoch, key_space, array("i", range(tokens)), computed, groups, list(demotions))


def lost(made: KvManager) -> list[tuple[int, str]]:
    assert made.verify() == []
    return [(rebuilt.sequence_id, rebuilt.problem) for rebuilt in made.take_restated() if rebuilt.problem]


def books(made: KvManager) -> list[object]:
    return [p.blocks.snapshot() for found in made.executors.values() for p in found.pools]


# Plain blocks


def test_after_a_restart_a_sequence_holds_its_very_blocks_again() -> None:
    made, session = manager()
    made.restate(session, restated())
    (rebuilt,) = made.take_restated()
    assert rebuilt.problem == ""
    assert [block.block_id for block in rebuilt.sealed] == [3]  # the first is full and known from now on
    assert only_executor(made).pools[0].blocks.leased_count == 3
    made.progress(session, 1, 8, [])
    grown = made.extend(session, 1, 13)
    assert grown is not None
    assert [group.block_ids for group in grown.blocks] == [[0]]
    made.release(session, 1)
    assert made.verify() == []
    answer = made.reserve(session, reservation(2, range(10)))
    assert answer is not None
    assert (answer.cached_tokens, ids(answer)[:2]) == (8, [3, 4])


def test_its_keys_are_those_of_the_inventory() -> None:
    first, session = manager()
    first.reserve(session, reservation(1, range(10)))
    _, sealed = first.progress(session, 1, 9, [])
    inventory = [InventoryBlock(block.group_id, block.block_id, block.key) for block in sealed]
    made = KvManager(LEASE)
    made.register(executor(), inventory, 1)
    again = made.open_session("s", 0.0)
    made.restate(again, restated(computed=9, blocks=(0, 1, 2)))
    (rebuilt,) = made.take_restated()
    assert (rebuilt.problem, rebuilt.sealed) == ("", [])  # nothing new
    assert only_executor(made).pools[0].blocks.leased_count == 3
    assert made.verify() == []


def test_a_prefix_that_several_share_is_held_by_all() -> None:
    made, session = manager()
    made.restate(session, restated(1, computed=8))
    made.restate(session, restated(2, computed=8, blocks=(3, 4, 6)))
    assert lost(made) == []
    assert only_executor(made).pools[0].blocks.leased_count == 4
    made.release(session, 1)
    made.progress(session, 2, 10, [])
    made.release(session, 2)
    assert made.verify() == []


def test_blocks_that_hold_no_token_yet_are_nobody_elses() -> None:
    made, session = manager()
    made.restate(session, restated(1, computed=4))
    made.restate(session, restated(2, computed=4, blocks=(3, 4, 6)))  # 4 is not full: nothing to share
    assert [sequence_id for sequence_id, _ in lost(made)] == [2]
    assert session.holdings.keys() == {1}


def test_older_content_of_blocks_yet_to_be_written_is_dropped() -> None:
    made = KvManager(LEASE)
    made.register(executor(), [InventoryBlock(0, 4, b"k" * 32)], 1)
    session = made.open_session("s", 0.0)
    made.restate(session, restated(computed=4))
    assert lost(made) == []
    assert only_executor(made).pools[0].index.find(b"k" * 32) is None


def test_a_new_stream_takes_over_what_the_older_one_held() -> None:
    made, older = manager()
    made.reserve(older, reservation(1, range(10)))
    made.progress(older, 1, 6, [])
    made.reserve(older, reservation(2, [50] * 6))  # the scheduler never heard of this one,
    made.extend(older, 1, 16)  # and not of this block
    newer = made.open_session("s", 1.0)
    made.restate(newer, restated(computed=7, blocks=(0, 1, 2)))
    assert made.all_restated(newer) == {"e"}
    assert lost(made) == []
    assert made.sessions == [newer]
    assert newer.holdings.keys() == {1}
    assert only_executor(made).pools[0].blocks.leased_count == 3
    made.end_session(older, 2.0)  # the older stream's end is noticed late
    assert newer.holdings.keys() == {1}
    assert made.verify() == []


def test_another_schedulers_sequences_are_left_alone() -> None:
    made, session = manager()
    other = made.open_session("other", 0.0)
    made.reserve(other, reservation(1, range(10)))
    made.restate(session, restated(1, computed=0, blocks=(0, 1, 2)))
    assert [sequence_id for sequence_id, _ in lost(made)] == [1]
    made.all_restated(session)
    assert other.holdings.keys() == {1}
    assert made.verify() == []


def test_what_is_stated_twice_is_held_once() -> None:
    made, session = manager()
    for _ in range(3):
        made.restate(session, restated())
    assert lost(made) == []
    made.release(session, 1)
    assert only_executor(made).pools[0].blocks.leased_count == 0
    assert made.verify() == []


def test_who_waits_for_a_filler_that_moves_to_a_new_stream_is_answered() -> None:
    made, older = manager(executor("e", pool(32)))
    made.reserve(older, reservation(1, range(14)))
    other = made.open_session("other", 0.0)
    assert made.reserve(other, reservation(5, range(14))) is None
    newer = made.open_session("s", 1.0)
    made.restate(newer, restated(1, tokens=14, computed=0, blocks=(0, 1, 2, 3)))
    assert made.answer_due() == []  # it is tried again, and waits for the same sequence
    made.progress(newer, 1, 14, [])
    ((owner, answer),) = made.answer_due()
    assert owner is other
    assert answer.cached_tokens == 12
    assert made.verify() == []


def test_restated_sequences_are_waited_for() -> None:
    made, session = manager(executor("e", pool(32)))
    made.restate(session, restated(1, tokens=14, computed=5, blocks=(0, 1, 2, 3)))
    assert made.reserve(session, reservation(2, range(14))) is None
    made.progress(session, 1, 14, [])
    ((_, answer),) = made.answer_due()
    assert answer.cached_tokens == 12


@pytest.mark.parametrize(
    "wrong",
    [
        restated(blocks=(5, 3)),  # a block that another holds
        restated(blocks=(0, 5, 5)),  # one twice
        restated(blocks=(0,)),  # too few for what is computed
        restated(blocks=(0, 5, 8)),  # there are eight
        restated(blocks=(0, 5, -1)),
        restated(epoch=0),
        restated(model="b" * 64),
        restated(kv_policy=str(POLICY)),
        restated(computed=11),
        restated(computed=-1),
        restated(tokens=0, computed=0),
        restated(sequence_id=0),
        replace(restated(blocks=(0, 5, 7)), tokens=array("i", [1, -1, 2, 3, 4, 5, 6])),
        replace(restated(), blocks=[GroupBlocks(1, [0, 5, 7])]),
        replace(restated(), blocks=[GroupBlocks(0, [0, 5]), GroupBlocks(0, [7])]),
        replace(restated(), blocks=[]),
        restated(blocks=(0, 5, 7), demotions=(Demoted(0, 4, [0], [1], [True]),)),  # no pool of colder blocks
        restated(blocks=(0, 5, 7), demotions=(Demoted(0, 4, [0], [1], []),)),
        restated(blocks=(0, 5, 7), demotions=(Demoted(0, 4, [], [], []), Demoted(0, 2, [], [], []))),
        restated(blocks=(6, 5, 7)),  # 6 has other content
        restated(blocks=(6, 5, 6)),
    ],
    ids=lambda wrong: str(wrong.blocks),
)
def test_what_cannot_be_is_lost_and_changes_nothing(wrong: Restated) -> None:
    made = KvManager(LEASE)
    made.register(executor(), [InventoryBlock(0, 6, b"k" * 32)], 1)
    session = made.open_session("s", 0.0)
    made.restate(session, restated(7, computed=4, blocks=(3,), tokens=5))
    assert lost(made) == []
    before = books(made)
    made.restate(session, wrong)
    (found,) = made.take_restated()
    assert found.sequence_id == wrong.sequence_id
    assert found.problem
    assert books(made) == before
    assert made.verify() == []
    with pytest.raises(Refused):
        made.release(session, wrong.sequence_id)


def test_a_block_named_for_shared_and_for_own_content_is_refused_whole() -> None:
    """Found by its key at one position, and named again as an empty one."""
    made, session = manager()
    made.restate(session, restated(1, computed=8))
    made.release(session, 1)  # its content stays
    before = books(made)
    made.restate(session, restated(2, computed=6, blocks=(3, 5, 3)))
    assert [sequence_id for sequence_id, _ in lost(made)] == [2]
    assert books(made) == before


def test_a_shared_block_is_shared_again_where_another_has_its_key() -> None:
    made, session = manager()
    made.restate(session, restated(1, computed=8, blocks=(0, 1, 2)))
    for sequence_id, last in ((2, 5), (3, 6)):  # who shared 3 and 4, whose keys were forgotten
        made.restate(session, restated(sequence_id, computed=8, blocks=(3, 4, last)))
    assert lost(made) == []
    assert only_executor(made).pools[0].blocks.leased_count == 7
    for sequence_id in (2, 1, 3):
        made.release(session, sequence_id)
    assert only_executor(made).pools[0].blocks.leased_count == 0
    assert made.verify() == []


def test_of_two_blocks_with_one_key_the_last_one_counts() -> None:
    """An executor cannot know which of them was dropped, but one was before the other came."""
    made = KvManager(LEASE)
    made.register(executor(), [InventoryBlock(0, block, b"k" * 32) for block in (5, 2)], 1)
    assert only_executor(made).pools[0].index.find(b"k" * 32) == 2


# Executors that are not there


def test_an_executor_that_comes_later_has_its_sequences() -> None:
    made = KvManager(LEASE)
    session = made.open_session("s", 0.0)
    made.restate(session, restated())
    assert made.all_restated(session) == set()
    assert made.take_restated() == []
    assert made.progress(session, 1, 9, []) == ("", [])
    assert made.extend(session, 1, 16) is None
    made.register(executor(), [], 1)
    (rebuilt,) = made.take_restated()
    assert rebuilt.problem == ""
    assert [block.block_id for block in rebuilt.sealed] == [3, 4]
    assert rebuilt.extension is not None
    assert rebuilt.extension.outcome == Outcome.GRANTED
    assert [group.block_ids for group in rebuilt.extension.blocks] == [[0]]
    assert session.holdings[1].slots == 16
    assert made.verify() == []


def test_nobody_grows_into_the_blocks_of_those_that_come_back_after_it() -> None:
    made = KvManager(LEASE)
    session = made.open_session("s", 0.0)
    made.restate(session, restated(1, blocks=(3, 4, 5)))
    made.restate(session, restated(2, computed=0, blocks=(0, 1, 2)))
    assert made.extend(session, 1, 16) is None
    made.register(executor(), [], 1)
    first, second = made.take_restated()
    assert second.problem == ""
    assert first.extension is not None
    assert [group.block_ids for group in first.extension.blocks] == [[6]]
    assert made.verify() == []


def test_an_extension_of_what_was_lost_is_not_answered() -> None:
    made = KvManager(LEASE)
    session = made.open_session("s", 0.0)
    made.restate(session, restated())
    assert made.extend(session, 1, 16) is None
    assert made.extend(session, 1, 0) is not None
    made.register(executor(), [], 2)  # another epoch
    (rebuilt,) = made.take_restated()
    assert rebuilt.problem
    assert rebuilt.extension is None


def test_one_that_never_comes_is_let_go() -> None:
    made = KvManager(LEASE)
    session = made.open_session("s", 0.0)
    made.restate(session, restated())
    assert made.release(session, 1) == ""
    made.register(executor(), [], 1)
    assert made.take_restated() == []
    assert only_executor(made).pools[0].blocks.leased_count == 0


def test_an_id_whose_executor_is_away_is_in_use() -> None:
    made = KvManager(LEASE)
    made.register(executor("other"), [], 1)
    session = made.open_session("s", 0.0)
    made.restate(session, restated())
    answer = made.reserve(session, reservation(1, range(4), on=["other"]))
    assert answer is not None
    assert answer.outcome == Outcome.INVALID
    made.register(executor(), [], 1)
    assert lost(made) == []


def test_sequences_of_a_dead_scheduler_wait_for_nobody() -> None:
    made = KvManager(LEASE)
    session = made.open_session("s", 0.0)
    made.restate(session, restated())
    made.end_session(session, 0.0)
    made.reclaim(LEASE)
    made.register(executor(), [], 1)
    assert made.take_restated() == []
    assert made.sessions == []


def test_sequences_on_an_executor_out_of_reach_are_not_lost() -> None:
    """Both streams broke, and the scheduler's is back first."""
    made, older = manager()
    for sequence_id, tokens in ((1, range(10)), (2, range(20, 30))):
        made.reserve(older, reservation(sequence_id, tokens))
        made.progress(older, sequence_id, 6, [])
    inventory = [InventoryBlock(0, block, key) for key, block in only_executor(made).pools[0].index.items()]
    made.unregister("e")
    newer = made.open_session("s", 1.0)
    first = restated(1, blocks=(0, 1, 2))
    second = replace(restated(2, blocks=(3, 4, 5)), tokens=array("i", range(20, 30)))
    made.restate(newer, first)
    made.restate(newer, second)
    made.all_restated(newer)
    made.register(executor(), inventory, 1)
    assert lost(made) == []
    assert newer.holdings.keys() == {1, 2}
    assert only_executor(made).pools[0].blocks.leased_count == 6


# Moves


def test_moves_under_way_when_the_kvmanager_restarts_are_over() -> None:
    world = World(spec("e", HOT_ONLY, (32,), disk=40))
    for token in range(1, 4):
        sequence_id = world.reserve([token] * 330, "e")
        world.go_on(sequence_id, 330)
        world.end(sequence_id)
        world.settle()
        world.release(sequence_id)
    world.settle()
    executor_ = world.executors["e"]
    assert executor_.waiting
    late = list(executor_.waiting)
    world.restart_kvmanager()
    world.register(executor_)
    world.open_stream()
    world.settle()
    assert not executor_.waiting
    world.manager.report("e", 1, [], late, [])
    assert world.manager.verify() == []
    world.finish()
