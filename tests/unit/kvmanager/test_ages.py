"""Formats by age: which copies a sequence gets when, what it shares, and what it gives back."""

from __future__ import annotations

import pytest

from services.common.kv_policy import KvPolicy
from services.kvmanager.holdings import Session
from services.kvmanager.manager import KvManager
from services.kvmanager.placement import Outcome
from services.kvmanager.reservations import Demoted, ExtensionAnswer, ReservationAnswer
from tests.unit.kvmanager.helpers import LEASE, manager, only_executor, reservation
from tests.unit.kvmanager.sim_executor import SIZE, spec
from tests.unit.kvmanager.world import World

POLICY = KvPolicy.parse("hot:128,int8:256,int4")
HOT, WARM, COLD = 40, 20, 20
WARM_ID, COLD_ID = HOT, HOT + WARM


def made_with(hot: int = HOT, warm: int = WARM, cold: int = COLD) -> tuple[KvManager, Session]:
    return manager(spec("e", POLICY, (hot, warm, cold)))


def reserve(
    made: KvManager, session: Session, sequence_id: int, tokens: list[int], lookahead: int = 0
) -> ReservationAnswer:
    wanted = reservation(sequence_id, tokens, lookahead=lookahead, kv_policy=str(POLICY))
    answer = made.reserve(session, wanted)
    assert answer is not None
    return answer


def extend(made: KvManager, session: Session, sequence_id: int, slots: int) -> ExtensionAnswer:
    answer = made.extend(session, sequence_id, slots)
    assert answer is not None
    return answer


def compute(made: KvManager, session: Session, sequence_id: int, length: int) -> list[int]:
    """Reports so many tokens as computed, extending first where slots lack. Returns the blocks that it sealed."""
    holding = session.holdings[sequence_id]
    sealed = []
    while holding.computed < length:
        if holding.slots < length:
            assert extend(made, session, sequence_id, min(length, holding.slots + 256)).outcome == Outcome.GRANTED
        reached = min(length, holding.slots)
        new = [0] * max(0, reached + 1 - len(holding.tokens))
        sealed += made.progress(session, sequence_id, reached, new)[1]
    return [block.block_id for block in sealed]


def counts(made: KvManager) -> list[tuple[int, int, int]]:
    assert made.verify() == []
    pools = only_executor(made).pools
    return [(p.blocks.free_count, p.blocks.cached_count, p.blocks.leased_count) for p in pools]


def demoted_ids(made: KvManager, session: Session, sequence_id: int) -> list[int]:
    (group,) = session.holdings[sequence_id].groups
    return group.block_ids()


def test_copies_are_held_from_the_moment_that_slots_reach_their_length() -> None:
    made, session = made_with()
    answer = reserve(made, session, 1, [1] * 700)
    (blocks,) = answer.blocks
    assert blocks.block_ids == list(range(8))  # 256 slots at first, of 700: older blocks shrink as it grows
    warm = [WARM_ID, WARM_ID + 1, WARM_ID + 2]
    assert answer.demotions == [Demoted(0, 256, [1, 2, 3], warm, [True] * 3)]
    assert counts(made) == [(HOT - 8, 0, 8), (WARM - 3, 0, 3), (COLD, 0, 0)]
    more = extend(made, session, 1, 512)
    assert [(change.length, sorted(change.positions)) for change in more.demotions] == [
        (384, [1, 2, 3, 4, 5, 6, 7]),
        (512, [4, 5, 6, 7, 8, 9, 10, 11]),
    ]
    assert counts(made) == [(HOT - 16, 0, 16), (WARM - 11, 0, 11), (COLD - 7, 0, 7)]


def test_progress_beyond_a_length_confirms_its_changes() -> None:
    made, session = made_with()
    reserve(made, session, 1, [1] * 700)
    compute(made, session, 1, 256)
    assert demoted_ids(made, session, 1) == list(range(8))  # the executor may still read the hot ones
    assert counts(made)[0] == (HOT - 8, 0, 8)
    extend(made, session, 1, 288)
    assert compute(made, session, 1, 257) == [WARM_ID, WARM_ID + 1, WARM_ID + 2]
    assert demoted_ids(made, session, 1) == [0, WARM_ID, WARM_ID + 1, WARM_ID + 2, 4, 5, 6, 7, 8]
    assert counts(made) == [(HOT - 9, 3, 6), (WARM - 3, 0, 3), (COLD, 0, 0)]


@pytest.mark.parametrize("length", [1, 31, 32, 255, 256, 257, 383, 384, 385, 640, 641, 700, 800])
def test_a_table_has_the_ages_of_its_length(length: int) -> None:
    made, session = made_with()
    reserve(made, session, 1, [1] * 700)
    compute(made, session, 1, length)
    (group,) = session.holdings[1].groups
    ages = [group.demoted.get(position, 0) for position in range(length // SIZE)]
    assert ages == [POLICY.age(position, SIZE, length - 1) for position in range(length // SIZE)]
    assert counts(made)  # and the books are sound


@pytest.mark.parametrize("length", [0, 1, 100, 256, 257, 384, 385, 500, 513, 700])
@pytest.mark.parametrize("ahead", [0, 256])
def test_all_comes_back_at_every_moment(length: int, ahead: int) -> None:
    made, session = made_with()
    reserve(made, session, 1, [1] * 700)
    compute(made, session, 1, length)
    if ahead:
        extend(made, session, 1, session.holdings[1].slots + ahead)
    made.release(session, 1)
    assert [leased for _, _, leased in counts(made)] == [0, 0, 0]


def test_copies_that_exist_are_shared_by_their_key() -> None:
    made, session = made_with()
    reserve(made, session, 1, [1] * 700)
    compute(made, session, 1, 700)
    hot = [pool.blocks.leased_count for pool in only_executor(made).pools]
    again = reserve(made, session, 2, [1] * 700)
    assert again.cached_tokens == 672  # all full blocks but the last tokens'
    assert not [change for change in again.demotions if any(change.writes)]
    assert demoted_ids(made, session, 2)[:21] == demoted_ids(made, session, 1)[:21]
    assert [pool.blocks.leased_count for pool in only_executor(made).pools][1:] == hot[1:]
    made.release(session, 1)
    compute(made, session, 2, 700)
    made.release(session, 2)
    assert [leased for _, _, leased in counts(made)] == [0, 0, 0]


def test_a_copy_that_another_sequence_wrote_meanwhile_is_found_when_more_is_granted() -> None:
    made, session = made_with()
    reserve(made, session, 1, [1] * 260)
    compute(made, session, 1, 260)
    second = reserve(made, session, 2, [1] * 200 + [2] * 300)
    assert second.cached_tokens == 192
    assert [(change.length, set(change.writes)) for change in second.demotions] == [(256, {False}), (384, {True})]


def test_a_hit_that_is_colder_than_prescribed_is_a_miss() -> None:
    made, session = made_with()
    reserve(made, session, 1, [1] * 700)
    compute(made, session, 1, 700)
    made.release(session, 1)
    hot = only_executor(made).pools[0]
    (group,) = reserve(made, session, 2, [1] * 700).blocks
    made.release(session, 2)
    for block in hot.blocks.eviction_order():
        if block != group.block_ids[0]:
            hot.discard(block)
    short = reserve(made, session, 3, [1] * 200)
    assert short.cached_tokens == SIZE  # only its first block is hot; the warm and cold ones are of no use
    assert counts(made)


def test_a_shorter_hit_must_be_hotter_so_that_a_match_may_shrink_twice() -> None:
    made, session = made_with()
    reserve(made, session, 1, [1] * 400)
    compute(made, session, 1, 400)
    made.release(session, 1)
    hot, warm, cold = only_executor(made).pools
    assert cold.blocks.cached_count == 3
    # Of 12 blocks, 4 to 7 are warm; without number 9 eight remain, whose view is 256: 4 to 7 must be hot there.
    key = hot.index.key_of(9)
    assert key is not None
    hot.discard(9)
    for block in (4, 5):
        hot.discard(block)
    answer = reserve(made, session, 2, [1] * 400)
    assert answer.cached_tokens == 4 * SIZE
    assert warm.blocks.leased_count > 0
    assert counts(made)


def test_a_hit_that_is_hotter_than_prescribed_is_converted_before_it_is_read() -> None:
    made, session = made_with()
    reserve(made, session, 1, [1] * 256)
    compute(made, session, 1, 256)
    made.release(session, 1)
    answer = reserve(made, session, 2, [1] * 300)
    (blocks,) = answer.blocks
    assert (answer.cached_tokens, blocks.block_ids[:8]) == (256, list(range(8)))
    (change, *_) = answer.demotions
    assert (change.length, change.positions, change.writes) == (256, [1, 2, 3], [True] * 3)
    assert sorted(change.block_ids) == [WARM_ID, WARM_ID + 1, WARM_ID + 2]


def test_what_is_cold_is_always_made_of_what_is_warm() -> None:
    """Hot blocks of a prefix so long that they must be cold at once take both steps."""
    policy = KvPolicy.parse("hot:32,int8:64,int4")
    made, session = manager(spec("e", policy, (40, 20, 20)))
    wanted = reservation(1, [1] * 256, kv_policy=str(policy))
    assert made.reserve(session, wanted) is not None
    for change in [c for group in session.holdings[1].groups for c in group.pending]:
        assert change.age in (1, 2)
    steps = [(change.position, change.age) for change in session.holdings[1].groups[0].pending]
    assert [age for position, age in steps if position == 1] == [1, 2]
    assert (2, 1) in steps
    made.progress(session, 1, 256, [])
    made.release(session, 1)
    assert made.verify() == []


def test_lack_of_colder_blocks_changes_nothing() -> None:
    made, session = made_with(warm=11, cold=8)
    reserve(made, session, 1, [1] * 512)
    extend(made, session, 1, 384)
    reserve(made, session, 3, [3] * 256)
    before = counts(made)
    answer = reserve(made, session, 2, [2] * 512)
    assert answer.outcome == Outcome.NO_BLOCKS
    assert "available" in answer.reasons[0]
    assert extend(made, session, 1, 512).outcome == Outcome.NO_BLOCKS  # progress gives some back
    assert counts(made) == before
    made.release(session, 3)
    assert extend(made, session, 1, 512).outcome == Outcome.GRANTED


def test_pools_that_are_too_small_for_a_sequence_are_named_at_once() -> None:
    made, session = made_with(warm=3)
    answer = reserve(made, session, 1, [1] * 700)
    assert answer.outcome == Outcome.NEVER_FITS
    assert "4 KV blocks, has 3" in answer.reasons[0]


def test_growth_beyond_a_colder_pool_never_fits() -> None:
    made, session = made_with(warm=8, cold=3)
    reserve(made, session, 1, [1] * 300)
    compute(made, session, 1, 384)
    assert extend(made, session, 1, 512).outcome == Outcome.NEVER_FITS
    compute(made, session, 1, 480)
    assert extend(made, session, 1, 481).outcome == Outcome.NEVER_FITS
    assert session.holdings[1].slots == 480
    assert counts(made)


def test_slots_that_come_free_by_growth_are_waited_for() -> None:
    """Asking far ahead of what is computed is no reason to fail: hot blocks come back on the way."""
    made, session = made_with(hot=18)
    reserve(made, session, 1, [1] * 700)
    assert extend(made, session, 1, 512).outcome == Outcome.GRANTED
    assert extend(made, session, 1, 700).outcome == Outcome.NO_BLOCKS
    compute(made, session, 1, 512)
    assert extend(made, session, 1, 700).outcome == Outcome.GRANTED
    assert extend(made, session, 1, 3000).outcome == Outcome.NEVER_FITS


def test_long_prompts_enter_pools_that_do_not_hold_them_hot() -> None:
    made, session = made_with(hot=20, warm=16, cold=60)
    reserve(made, session, 1, [1] * 1500)
    compute(made, session, 1, 1500)
    assert counts(made)[0][2] < 20


def test_a_lost_schedulers_copies_come_back() -> None:
    made, session = made_with()
    reserve(made, session, 1, [1] * 700)
    compute(made, session, 1, 300)
    made.end_session(session, 0.0)
    made.report("e", 2, [1])
    assert made.reclaim(LEASE) == {"e"}
    assert [leased for _, _, leased in counts(made)] == [0, 0, 0]


def test_an_executor_that_returns_with_less_keeps_what_is_held() -> None:
    made, session = made_with()
    reserve(made, session, 1, [1] * 700)
    compute(made, session, 1, 300)
    made.unregister("e")
    made.register(spec("e", POLICY, (HOT, WARM, COLD)), [], 1)
    assert counts(made)[1] == (WARM - 3, 0, 3)
    compute(made, session, 1, 700)
    made.release(session, 1)
    assert [leased for _, _, leased in counts(made)] == [0, 0, 0]


def test_every_token_reads_its_own_prefix_in_the_ages_of_its_length() -> None:
    """Two sequences with a common prefix, side by side and one after the other, on an executor that checks."""
    world = World(spec("e", POLICY, (30, 16, 24)))
    first, second = world.reserve([1] * 500, "e"), world.reserve([1] * 300 + [2] * 200, "e")
    for _ in range(12):
        world.go_on(first, 90)
        world.go_on(second, 90)
    assert world.stays[first].computed > 700
    world.end(first)
    world.settle()
    world.release(first)
    third = world.reserve([1] * 640, "e")
    for _ in range(4):
        world.go_on(third, 90)
    assert world.stays[third].executor.running[third].computed >= 640
    world.finish()
