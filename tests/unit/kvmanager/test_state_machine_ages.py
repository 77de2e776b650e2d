"""Random histories with formats by age, moves between tiers and restated sequences; messages wait, get lost, repeat.

Every token that an executor computes reads blocks that hold exactly its own prefix, in the ages that its length
prescribes; the books are sound after each step; and once all is over, everything was answered and given back.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.common.kv_policy import HOT_ONLY, KvPolicy
from tests.unit.kvmanager.helpers import LEASE
from tests.unit.kvmanager.sim_executor import SIZE, SimExecutor, spec
from tests.unit.kvmanager.world import World

AGES = KvPolicy.parse("hot:128,int8:256,int4")
SPECS = [spec("ages", AGES, (30, 16, 18), disk=6), spec("tiers", HOT_ONLY, (32,), disk=30)]

names = st.sampled_from([made.executor_id for made in SPECS])
numbers = st.integers(0, 1 << 16)  # which of those that there are
rarely = st.sampled_from([True, *[False] * 9])
prompts = st.builds(
    lambda shared, own, more: [1] * shared + [own] * more,
    st.sampled_from([0, 96, 128, 160, 224, 320, 416]),
    st.integers(2, 3),
    st.sampled_from([1, 20, 33, 64, 100, 180]),
)


class AgesMachine(RuleBasedStateMachine):
    """One scheduler, an executor with formats by age, and one with a lower tier."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(*SPECS)

    # What happens most of the time

    @rule(
        tokens=prompts,
        lookahead=st.sampled_from([0, 31, 64]),
        name=names,
        namespace=st.sampled_from(["x", "x", "x", "y"]),
        skips=rarely,
    )
    @precondition(lambda self: len(self.world.stays) + len(self.world.asked) < 7)
    def reserve(self, tokens: list[int], lookahead: int, name: str, namespace: str, skips: bool) -> None:
        self.world.reserve(tokens, name, lookahead=lookahead, namespace=namespace, skips=skips)

    @rule(number=numbers, turns=st.integers(1, 6), steps=st.sampled_from([30, 128, 200]))
    @precondition(lambda self: self.world.stays)
    def go_on(self, number: int, turns: int, steps: int) -> None:
        sequence_id = self.pick(number)
        for _ in range(turns):
            self.world.go_on(sequence_id, steps)

    @rule(tokens=prompts, name=names, turns=st.integers(1, 3))
    def serve(self, tokens: list[int], name: str, turns: int) -> None:
        """A short life as a whole: it leaves cached content."""
        sequence_id = self.world.reserve(tokens, name)
        for _ in range(turns):
            self.world.go_on(sequence_id, 200)
        if sequence_id in self.world.stays:
            self.world.end(sequence_id)
            self.world.settle()
            self.world.release(sequence_id)

    @rule()
    @precondition(lambda self: any(e.waiting for e in self.world.executors.values()))
    def move_all(self) -> None:
        self.world.move_all()

    # One message or step at a time

    @rule(count=st.integers(1, 4))
    @precondition(lambda self: self.world.inbox)
    def hear_of_the_kvmanager(self, count: int) -> None:
        for _ in range(min(count, len(self.world.inbox))):
            self.world.inbox.popleft()()

    @rule(number=numbers, more=st.sampled_from([1, 64, 256]))
    @precondition(lambda self: self.world.stays)
    def extend(self, number: int, more: int) -> None:
        if not self.world.stays[self.pick(number)].leaving:
            self.world.extend(self.pick(number), more)

    @rule(number=numbers, repeats=rarely)
    @precondition(lambda self: self.world.stays)
    def hear_of_the_executor(self, number: int, repeats: bool) -> None:
        if not self.world.stays[self.pick(number)].leaving:
            self.world.hear_results(self.pick(number), repeats=repeats)

    @rule(number=numbers)
    @precondition(lambda self: len(self.world.stays) > 2)
    def end(self, number: int) -> None:
        if not self.world.stays[self.pick(number)].leaving:
            self.world.end(self.pick(number))

    @rule(number=numbers, repeats=rarely)
    @precondition(lambda self: any(stay.leaving for stay in self.world.stays.values()))
    def release(self, number: int, repeats: bool) -> None:
        if self.world.stays[self.pick(number)].leaving:
            self.world.release(self.pick(number), repeats=repeats)

    @rule(number=numbers)
    @precondition(lambda self: any(e.plans for e in self.world.executors.values()))
    def take_plan(self, number: int) -> None:
        waiting = [e for e in self.world.executors.values() if e.plans]
        waiting[number % len(waiting)].take_plan()

    @rule(number=numbers, steps=st.sampled_from([1, 30, 100, 128, 700]))
    @precondition(lambda self: any(e.running for e in self.world.executors.values()))
    def compute(self, number: int, steps: int) -> None:
        running = [(e, i) for e in self.world.executors.values() for i in e.running]
        executor, sequence_id = running[number % len(running)]
        executor.compute(sequence_id, steps)

    @rule(number=numbers, fails=rarely)
    @precondition(lambda self: any(e.waiting for e in self.world.executors.values()))
    def move(self, number: int, fails: bool) -> None:
        waiting = [(e, i) for e in self.world.executors.values() for i in e.waiting]
        executor, operation_id = waiting[number % len(waiting)]
        executor.move(operation_id, well=not fails)

    @rule(number=numbers, repeats=rarely)
    def report(self, number: int, repeats: bool) -> None:
        self.world.report(self.executor(number), repeats=repeats)

    # Losses

    @rule(number=numbers, kind=st.sampled_from(["stream", "executor", "epoch", "kvmanager", "time", "time"]))
    def trouble(self, number: int, kind: str) -> None:
        match kind:
            case "stream":
                self.world.break_stream()
            case "executor":
                self.world.unregister(self.executor(number))
            case "epoch":
                self.world.new_epoch(self.executor(number))
            case "kvmanager":
                self.world.restart_kvmanager()
            case "time":
                self.world.pass_time(LEASE * (number % 3) / 2)

    @rule()
    @precondition(lambda self: self.world.session is None)
    def open_stream(self) -> None:
        self.world.open_stream()

    @rule(number=numbers)
    @precondition(lambda self: not all(map(self.world.is_connected, self.world.executors.values())))
    def executor_returns(self, number: int) -> None:
        if not self.world.is_connected(self.executor(number)):
            self.world.register(self.executor(number))

    # What must hold

    @invariant()
    def books_are_sound(self) -> None:
        assert self.world.manager.verify() == []

    @invariant()
    def tables_have_the_ages_that_lengths_prescribe(self) -> None:
        for executor in self.world.manager.executors.values():
            keys: defaultdict[tuple[int, int], set[bytes]] = defaultdict(set)
            for holding in executor.holdings:
                (group,) = holding.groups
                for position in range(holding.computed // SIZE):
                    age = group.demoted.get(position, 0)
                    keys[age, group.blocks[position]].add(group.keys[position])
                    # Where the length is that of a change, a cached prefix has it behind itself, others ahead.
                    lengths = (holding.computed - 1, holding.computed)
                    prescribed = [executor.spec.policy.age(position, SIZE, length) for length in lengths]
                    changes = any(demotion.position == position for demotion in group.pending)
                    assert age in prescribed or (age < prescribed[0] and changes), f"{position} of {holding}"
            assert all(len(found) == 1 for found in keys.values()), "a block with two contents"

    def teardown(self) -> None:
        self.world.finish()

    def pick(self, number: int) -> int:
        return list(self.world.stays)[number % len(self.world.stays)]

    def executor(self, number: int) -> SimExecutor:
        return list(self.world.executors.values())[number % len(self.world.executors)]


TestAges = AgesMachine.TestCase
TestAges.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@pytest.mark.full
@pytest.mark.timeout(3600)
class TestLongHistories(AgesMachine.TestCase):
    """100,000 operations."""

    settings = settings(max_examples=1000, stateful_step_count=100, deadline=None)
