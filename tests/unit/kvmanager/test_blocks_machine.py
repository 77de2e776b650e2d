"""Random histories of a block pool with priorities, pins and quotas against a naive model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.kvmanager.blocks import BlockPool, BlockState
from tests.unit.kvmanager.naive_blocks import NaiveBlockPool

COUNT = 9
QUOTAS = {1: 2, 2: 0}
owners = st.integers(0, 3)
priorities = st.sampled_from([0, 0, 0, 1, 50, 100])
pins = st.sampled_from([0.0, 0.0, 1.0, 2.0, 5.0])
choices = st.integers(0, COUNT - 1)


class BlockPoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.real = BlockPool(COUNT)
        self.naive = NaiveBlockPool(COUNT, QUOTAS)
        for owner, quota in QUOTAS.items():
            self.real.policy.set_quota(owner, quota)

    @rule(count=st.integers(1, 4), owner=owners, settle=st.booleans())
    def take(self, count: int, owner: int, settle: bool) -> None:
        count = min(count, self.naive.available)
        taken, evicted = self.naive.take(count, owner)
        real = self.real.take(count, owner)
        assert (real.blocks, real.evicted) == (taken, evicted)
        if settle:
            for block in taken:
                self.real.advance(block, BlockState.READY)
                self.real.keep(block)
                self.naive.blocks[block].has_content = True

    @rule(count=st.integers(1, 4), owner=owners, priority=priorities, pin=pins)
    def serve(self, count: int, owner: int, priority: int, pin: float) -> None:
        before = self.held()
        self.take(count, owner, settle=True)
        for block in reversed(self.held()):
            if block not in before:
                self.drop_one(block, priority, pin)

    @precondition(lambda self: self.with_content())
    @rule(choice=choices, count=st.integers(1, 3))
    def hold(self, choice: int, count: int) -> None:
        found = self.with_content()
        blocks = [found[(choice + index) % len(found)] for index in range(count)]
        self.real.hold(blocks)
        for block in blocks:
            self.naive.hold(block)

    @precondition(lambda self: self.held())
    @rule(choice=choices, priority=priorities, pin=pins)
    def drop(self, choice: int, priority: int, pin: float) -> None:
        held = self.held()
        self.drop_one(held[choice % len(held)], priority, pin)

    @rule(priority=priorities, pin=pins)
    def drop_all(self, priority: int, pin: float) -> None:
        for block in self.held():
            for _ in range(self.naive.blocks[block].holders):
                self.drop_one(block, priority, pin)

    @rule(block=choices, priority=priorities, pin=pins)
    def touch(self, block: int, priority: int, pin: float) -> None:
        end = self.naive.now + pin if pin else 0.0
        self.real.touch(block, priority, end)
        self.naive.touch(block, priority, end)

    @precondition(lambda self: self.with_content())
    @rule(choice=choices)
    def forget(self, choice: int) -> None:
        found = self.with_content()
        self.real.forget(found[choice % len(found)])
        self.naive.forget(found[choice % len(found)])

    @rule(seconds=st.sampled_from([0.5, 1.0, 5.0]))
    def pass_time(self, seconds: float) -> None:
        now = self.naive.now + seconds
        self.real.policy.pass_time(now)
        self.naive.pass_time(now)

    @invariant()
    def all_is_as_in_the_model(self) -> None:
        real, naive = self.real, self.naive
        assert real.free_order() == naive.free
        assert real.eviction_order() == naive.order()
        assert real.oldest(3) == naive.order()[: min(3, len(naive.queue))]
        assert real.available_count == naive.available
        assert real.policy.pinned_count == len(naive.pinned) <= COUNT // 2
        assert real.free_count + real.cached_count + real.leased_count == COUNT
        assert real.leased_count == len(self.held())
        assert list(real.snapshot().references) == [block.holders for block in naive.blocks]
        ends = [naive.blocks[block].pin_end for block in naive.pinned]
        assert real.policy.next_pin_end() == (min(ends) if ends else None)
        for owner, count in enumerate(real.owned_counts):
            used = [block for block in range(COUNT) if block not in naive.free]
            assert count == sum(naive.blocks[block].owner == owner for block in used)
        for owner, quota in QUOTAS.items():
            pinned = sum(naive.blocks[block].owner == owner for block in naive.pinned)
            assert real.policy.may_pin(owner) == (pinned < quota)

    def drop_one(self, block: int, priority: int, pin: float) -> None:
        end = self.naive.now + pin if pin else 0.0
        self.real.drop(block, priority, end)
        self.naive.drop(block, priority, end)

    def with_content(self) -> list[int]:
        return [block for block, known in enumerate(self.naive.blocks) if known.has_content]

    def held(self) -> list[int]:
        return [block for block, known in enumerate(self.naive.blocks) if known.holders]


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


@pytest.mark.full
class TestLongHistories(BlockPoolMachine.TestCase):
    """100,000 operations."""

    settings = settings(max_examples=2000, stateful_step_count=50, deadline=None)
