"""The block pool: exact ids, order of free and cached blocks, and what it refuses."""

from __future__ import annotations

import pytest

from services.kvmanager.blocks import BlockPool, BlockState


def cached_pool(count: int, cached: int) -> BlockPool:
    """A pool whose first `cached` blocks are cached, block 0 the oldest."""
    pool = BlockPool(count)
    for block in pool.take(cached).blocks:
        pool.advance(block, BlockState.READY)
        pool.keep(block)
        pool.drop(block)
    return pool


def test_fresh_blocks_are_handed_out_lowest_first() -> None:
    pool = BlockPool(5)
    assert pool.take(2) == ([0, 1], [], [])
    assert pool.take(1) == ([2], [], [])
    assert pool.free_order() == [3, 4]
    assert [pool.state(block) for block in range(4)] == [BlockState.RESERVED] * 3 + [BlockState.FREE]


def test_freed_blocks_come_back_most_recent_first() -> None:
    pool = BlockPool(5)
    pool.take(4)
    pool.drop(1)
    pool.drop(3)
    assert pool.free_order() == [3, 1, 4]
    assert pool.take(3).blocks == [3, 1, 4]


def test_eviction_takes_the_oldest_cached_blocks_after_the_free_ones() -> None:
    pool = cached_pool(5, cached=3)
    assert (pool.free_count, pool.cached_count, pool.available_count, pool.leased_count) == (2, 3, 5, 0)
    assert pool.take(4, owner=2) == ([3, 4, 0, 1], [0, 1], [0, 0])
    assert pool.eviction_order() == [2]
    assert not pool.is_keyed(0)
    assert pool.leased_count == 4


def test_holding_a_cached_block_saves_it_from_eviction_and_makes_it_the_newest_later() -> None:
    pool = cached_pool(3, cached=3)
    pool.hold([0, 1])
    assert pool.evictable_among([0, 1, 2]) == 1
    assert [pool.is_idle(block) for block in range(3)] == [False, False, True]
    pool.drop(0)
    assert pool.eviction_order() == [2, 0]
    assert pool.snapshot().references[1] == 1
    assert pool.state(1) == BlockState.READY


def test_touch_makes_a_cached_block_the_newest() -> None:
    pool = cached_pool(4, cached=3)
    pool.touch(0)
    assert pool.eviction_order() == [1, 2, 0]
    pool.touch(3)  # free: nothing to do
    assert pool.free_order() == [3]


def test_a_shared_block_stays_until_its_last_holder_leaves() -> None:
    pool = cached_pool(2, cached=1)
    pool.hold([0])
    pool.hold([0])
    pool.drop(0)
    assert pool.cached_count == 0
    pool.drop(0)
    assert pool.eviction_order() == [0]


def test_forget_frees_a_cached_block_at_once_and_a_held_one_later() -> None:
    pool = cached_pool(3, cached=2)
    pool.hold([1])
    pool.forget(0)
    pool.forget(1)
    assert pool.free_order() == [0, 2]
    pool.drop(1)
    assert pool.free_order() == [1, 0, 2]
    assert pool.cached_count == 0


def test_restore_makes_free_blocks_cached_in_the_given_order() -> None:
    pool = BlockPool(5)
    pool.restore([3, 1])
    assert pool.eviction_order() == [3, 1]
    assert pool.free_order() == [0, 2, 4]


@pytest.mark.parametrize("blocks", [[1, 1], [0]])
def test_restore_refuses_repeated_and_held_blocks(blocks: list[int]) -> None:
    pool = BlockPool(3)
    pool.take(1)
    with pytest.raises(ValueError, match="distinct and free"):
        pool.restore(blocks)
    assert pool.free_order() == [1, 2]


def test_claimed_blocks_are_held_once_and_the_others_stay_in_order() -> None:
    pool = BlockPool(5)
    pool.claim([3, 1], owner=1)
    assert pool.free_order() == [0, 2, 4]
    assert list(pool.snapshot().references) == [0, 1, 0, 1, 0]
    assert list(pool.owned_counts) == [0, 2]
    with pytest.raises(ValueError, match="distinct and free"):
        pool.claim([3])


def test_owners_have_what_they_hold_and_what_they_left_cached() -> None:
    pool = cached_pool(4, cached=2)
    assert list(pool.owned_counts) == [2]
    pool.take(3, owner=2)  # 2, 3, and 0 for the room
    assert list(pool.owned_counts) == [1, 0, 3]
    pool.drop(2)
    assert list(pool.owned_counts) == [1, 0, 2]
    pool.hold([1])
    pool.adopt([1, 3], owner=1)  # 3 has an owner
    assert list(pool.owned_counts) == [0, 1, 2]
    assert [pool.owner(block) for block in (0, 1, 3)] == [2, 1, 2]
    pool.forget(1)
    pool.drop(1)
    assert list(pool.owned_counts) == [0, 0, 2]


def test_the_same_block_twice_in_one_hold_counts_twice() -> None:
    pool = cached_pool(2, cached=2)
    pool.hold([0, 0])
    assert pool.eviction_order() == [1]
    pool.drop(0)
    assert pool.eviction_order() == [1]
    pool.drop(0)
    assert pool.eviction_order() == [1, 0]


def test_refusals_change_nothing() -> None:
    pool = cached_pool(4, cached=1)
    before = (pool.free_order(), pool.eviction_order(), pool.snapshot())
    with pytest.raises(ValueError, match="5 blocks asked for, 4 available"):
        pool.take(5)
    with pytest.raises(ValueError, match="freed twice"):
        pool.drop(3)
    with pytest.raises(ValueError, match="freed twice"):
        pool.drop(0)  # cached
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.hold([0, 2])
    with pytest.raises(ValueError, match="cannot become READY"):
        pool.advance(2, BlockState.READY)
    with pytest.raises(ValueError, match="cannot be keyed"):
        pool.keep(2)
    with pytest.raises(ValueError, match="not keyed"):
        pool.forget(2)
    assert (pool.free_order(), pool.eviction_order(), pool.snapshot()) == before


def test_states_only_go_forward_while_held() -> None:
    pool = BlockPool(1)
    pool.take(1)
    pool.advance(0, BlockState.PENDING)
    pool.advance(0, BlockState.READY)
    with pytest.raises(ValueError, match="cannot become PENDING from READY"):
        pool.advance(0, BlockState.PENDING)
    pool.drop(0)
    assert pool.state(0) == BlockState.FREE
