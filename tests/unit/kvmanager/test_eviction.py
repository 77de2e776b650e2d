"""What goes first: priorities, pins and quotas, alone and together."""

from __future__ import annotations

import pytest

from services.kvmanager.blocks import BlockPool, BlockState
from services.kvmanager.rings import PriorityQueue, Rings


def filled(pool: BlockPool, count: int, owner: int = 0) -> list[int]:
    """Fresh blocks with content, held once."""
    blocks = pool.take(count, owner).blocks
    for block in blocks:
        pool.advance(block, BlockState.READY)
        pool.keep(block)
    return blocks


def cache(pool: BlockPool, count: int, owner: int = 0, priority: int = 0, pin_end: float = 0.0) -> list[int]:
    blocks = filled(pool, count, owner)
    for block in blocks:
        pool.drop(block, priority, pin_end)
    return blocks


def test_lower_priorities_go_first_and_older_blocks_within_one() -> None:
    pool = BlockPool(6)
    for priority in (100, 0, 50, 0, 100, 50):
        cache(pool, 1, priority=priority)
    assert pool.eviction_order() == [1, 3, 2, 5, 0, 4]
    assert pool.take(3).evicted == [1, 3, 2]
    assert pool.eviction_order() == [5, 0, 4]


def test_a_block_keeps_the_highest_priority_that_a_user_gave_until_it_is_evicted() -> None:
    pool = BlockPool(3)
    cache(pool, 1, priority=70)
    cache(pool, 1, priority=60)
    pool.hold([0])
    pool.drop(0, priority=10)
    assert pool.eviction_order() == [1, 0]
    pool.hold([1])
    pool.hold([1])
    pool.drop(1, priority=80)  # not the last holder
    pool.drop(1)
    assert pool.eviction_order() == [0, 1]
    assert pool.take(3).evicted == [0, 1]
    for block in (0, 1):
        pool.advance(block, BlockState.READY)
        pool.keep(block)
        pool.drop(block)
    pool.touch(0, priority=1)
    assert pool.eviction_order() == [1, 0]


def test_a_pinned_block_is_not_handed_out_until_its_pin_ends() -> None:
    pool = BlockPool(4)
    cache(pool, 1, pin_end=10.0)
    cache(pool, 1)
    assert (pool.cached_count, pool.available_count, pool.policy.pinned_count) == (2, 3, 1)
    assert pool.eviction_order() == [1, 0]
    assert pool.oldest(2) == [1]
    assert pool.evictable_among([0, 1]) == 1
    with pytest.raises(ValueError, match="4 blocks asked for, 3 available"):
        pool.take(4)
    assert pool.policy.next_pin_end() == 10.0
    pool.policy.pass_time(9.9)
    assert pool.available_count == 3
    pool.policy.pass_time(10.0)
    assert (pool.available_count, pool.policy.next_pin_end()) == (4, None)
    assert pool.eviction_order() == [1, 0]  # the newest now
    assert pool.take(4).evicted == [1, 0]


def test_a_pin_outlives_other_users_and_a_later_end_wins() -> None:
    pool = BlockPool(4)
    cache(pool, 1, pin_end=10.0)
    pool.hold([0])
    assert pool.policy.next_pin_end() is None
    pool.drop(0)
    assert pool.policy.next_pin_end() == 10.0
    pool.touch(0, pin_end=20.0)
    pool.touch(0, pin_end=15.0)
    assert pool.policy.next_pin_end() == 20.0
    pool.hold([0])
    pool.policy.pass_time(20.0)
    pool.drop(0)
    assert (pool.policy.pinned_count, pool.available_count) == (0, 4)


def test_pins_take_half_of_a_pool_and_the_first_ends_give_way() -> None:
    pool = BlockPool(6)
    cache(pool, 1, pin_end=30.0)
    cache(pool, 2, pin_end=10.0)
    assert (pool.policy.pinned_count, pool.available_count) == (3, 3)
    cache(pool, 1, pin_end=20.0)
    assert pool.eviction_order() == [1, 2, 3, 0]  # 1 is not pinned any more
    cache(pool, 1, pin_end=5.0)
    assert pool.eviction_order() == [1, 4, 2, 3, 0]  # the new one ends first
    assert (pool.policy.pinned_count, pool.available_count) == (3, 3)
    pool.policy.pass_time(10.0)
    assert pool.eviction_order() == [1, 4, 2, 3, 0]
    assert pool.policy.pinned_count == 2


def test_forgotten_content_is_not_pinned_any_more() -> None:
    pool = BlockPool(4)
    cache(pool, 1, priority=9, pin_end=10.0)
    pool.forget(0)
    assert (pool.policy.pinned_count, pool.available_count, pool.policy.next_pin_end()) == (0, 4, None)
    cache(pool, 2)
    assert pool.eviction_order() == [0, 1]


def test_an_owner_above_its_quota_loses_its_own_blocks_first() -> None:
    pool = BlockPool(6)
    pool.policy.set_quota(1, 2)
    cache(pool, 1, owner=2)
    cache(pool, 3, owner=1)
    cache(pool, 2, owner=2)
    assert pool.take(1, owner=2).evicted == [1]  # not 0, which is older
    assert pool.take(1, owner=1).evicted == [0]  # within the quota: as everybody


def test_an_owner_at_its_quota_is_as_everybody() -> None:
    pool = BlockPool(3)
    pool.policy.set_quota(1, 2)
    cache(pool, 1, owner=2)
    cache(pool, 2, owner=1)
    assert pool.take(1, owner=1).evicted == [0]


def test_of_several_owners_above_quota_the_asker_pays_itself() -> None:
    pool = BlockPool(6)
    pool.policy.set_quota(1, 0)
    pool.policy.set_quota(2, 1)
    cache(pool, 3, owner=1)
    cache(pool, 3, owner=2)
    assert pool.take(1, owner=2).evicted == [3]
    assert pool.take(1, owner=3).evicted == [0]  # of who has been above it longest
    assert pool.take(1, owner=2).evicted == [4]
    assert pool.take(1, owner=2).evicted == [1]
    pool.drop(0)
    assert pool.take(3, owner=1).evicted == [2, 5]


def test_priorities_hold_within_a_quota_and_pins_count_for_pins_only() -> None:
    pool = BlockPool(8)
    pool.policy.set_quota(1, 2)
    cache(pool, 1, owner=1, priority=5)
    cache(pool, 2, owner=1)
    cache(pool, 2, owner=1, pin_end=10.0)
    assert not pool.policy.may_pin(1)
    assert pool.policy.may_pin(2)
    assert pool.take(4, owner=1).evicted == [1]
    pool.policy.pass_time(10.0)
    assert pool.policy.may_pin(1)
    assert pool.take(3, owner=2).evicted == [2, 3, 4]


def test_without_quota_an_owner_is_as_everybody() -> None:
    pool = BlockPool(2)
    pool.policy.set_quota(1, 0)
    pool.policy.drop_quota(1)
    pool.policy.drop_quota(5)
    cache(pool, 1, owner=2)
    cache(pool, 1, owner=1)
    assert pool.take(1, owner=1).evicted == [0]


def test_pins_that_come_and_go_leave_nothing_behind() -> None:
    pool = BlockPool(4)
    cache(pool, 1, pin_end=1.0)
    for end in range(2, 1000):
        pool.touch(0, pin_end=float(end))
    assert len(pool.policy._pins._ends) < 200
    assert len(pool.policy._rings._newer) < 10
    assert pool.policy.next_pin_end() == 999.0


def test_rings_keep_order_and_names() -> None:
    rings = Rings(4)
    one, two = rings.open(), rings.open()
    for block in (2, 0):
        rings.append(one, block)
    rings.append(two, 1)
    assert (list(rings.blocks(one)), list(rings.blocks(two))) == ([2, 0], [1])
    with pytest.raises(ValueError, match="holds blocks"):
        rings.close(two)
    rings.remove(1)
    rings.close(two)
    assert rings.open() == two
    rings.remove_all([2, 0])
    assert rings.is_empty(one)


def test_a_priority_queue_knows_when_it_is_empty() -> None:
    queue = PriorityQueue(Rings(3))
    assert queue.first() is None
    queue.append(1, 100)
    queue.append(2, 0)
    assert (queue.first(), list(queue.blocks())) == (2, [2, 1])
    queue.remove(2)
    assert queue.first() == 1
    queue.remove(1)
    assert queue.first() is None
    queue.close()
