"""A scheduler between the kvmanager and executors: what it was told, what it knows, and what is still on its way."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from services.kvmanager.executors import ExecutorSpec, InventoryBlock
from services.kvmanager.holdings import Refused, Session
from services.kvmanager.keys import KeySpace
from services.kvmanager.manager import Answer, KvManager, Rebuilt
from services.kvmanager.moves import Move
from services.kvmanager.placement import Outcome
from services.kvmanager.reservations import AllowedExecutor, ExtensionAnswer, Reservation, ReservationAnswer
from tests.unit.kvmanager.helpers import LEASE, MODEL
from tests.unit.kvmanager.sim_executor import SIZE, Plan, Running, SimExecutor, Stay

OPERATIONS = 1_000_000
"""Operation ids of one kvmanager's process."""


class World:
    """A scheduler, a kvmanager and executors. The kvmanager hears at once; its own words wait in `inbox`, in order."""

    def __init__(self, *specs: ExecutorSpec) -> None:
        self.now = 0.0
        self.executors = {made.executor_id: SimExecutor(made) for made in specs}
        self.stays: dict[int, Stay] = {}
        self.asked: dict[int, tuple[array[int], str]] = {}
        self.extending: set[int] = set()
        self.inbox: deque[Callable[[], None]] = deque()
        self.next_id = 1
        self.session: Session | None = None
        self.first_operation_id = 1
        self.manager = KvManager(LEASE, self.first_operation_id)
        for executor in self.executors.values():
            self.register(executor)
        self.open_stream()

    # The scheduler speaks. Without a stream it is silent.

    def reserve(
        self, tokens: Sequence[int], name: str, *, lookahead: int = 0, namespace: str = "x", skips: bool = False
    ) -> int:
        """Returns the sequence's id. Asked twice, the second time is refused."""
        sequence_id, self.next_id = self.next_id, self.next_id + 1
        if self.session is None:
            return sequence_id
        executor = self.executors[name]
        self.asked[sequence_id] = array("i", tokens), namespace
        wanted = Reservation(
            sequence_id,
            self._key_space(executor, namespace),
            array("i", tokens),
            lookahead,
            [AllowedExecutor(name, executor.epoch)],
            skips,
        )
        answer = self.manager.reserve(self.session, wanted)
        if answer is not None:
            self.inbox.append(partial(self._placed, answer))
        if answer is None or answer.outcome == Outcome.GRANTED:
            again = self.manager.reserve(self.session, wanted)
            assert again is not None
            assert again.outcome == Outcome.INVALID
        self.follow()
        return sequence_id

    def extend(self, sequence_id: int, more: int) -> None:
        if self.session is None or sequence_id in self.extending:
            return
        self.extending.add(sequence_id)
        slots = len(self.stays[sequence_id].blocks) * SIZE + more
        answer = self.manager.extend(self.session, sequence_id, slots)
        if answer is not None:
            self.inbox.append(partial(self._extended, answer))

    def hear_results(self, sequence_id: int, *, repeats: bool = False) -> None:
        """What the executor computed; the kvmanager hears of it."""
        stay = self.stays[sequence_id]
        held = stay.executor.running.get(sequence_id)
        if held is None:
            return
        stay.tokens, stay.computed = held.tokens[:], held.computed
        if self.session is None:
            return
        new = stay.tokens[stay.reported :].tolist()
        stay.reported = len(stay.tokens)
        if sequence_id not in self.session.holdings and sequence_id not in self.session.absent:
            with pytest.raises(Refused):
                self.manager.progress(self.session, sequence_id, stay.computed, new)
            return
        _, sealed = self.manager.progress(self.session, sequence_id, stay.computed, new)
        if sealed:
            blocks = [InventoryBlock(block.group_id, block.block_id, block.key) for block in sealed]
            self.inbox.append(partial(self._tell, stay.executor, stay.executor.epoch, Plan(sealed=blocks)))
        if repeats and new and sequence_id in self.session.holdings:
            with pytest.raises(Refused):
                self.manager.progress(self.session, sequence_id, stay.computed, new)
        self.follow()

    def end(self, sequence_id: int) -> None:
        """Cancelled, preempted or lost: its executor is told."""
        stay = self.stays[sequence_id]
        stay.leaving = True
        stay.executor.plans.append(Plan(ended=sequence_id))

    def release(self, sequence_id: int, *, repeats: bool = False) -> None:
        """Does nothing before the executor has answered the plan that ended it."""
        if self.session is None or self.stays[sequence_id].executor.knows(sequence_id):
            return
        self._let_go(sequence_id)
        if repeats:
            with pytest.raises(Refused):
                self.manager.release(self.session, sequence_id)
        self.follow()

    # Streams

    def open_stream(self) -> None:
        """All that is held is stated again, by a scheduler that may have missed answers."""
        self.session = self.manager.open_session("s", self.now)
        self.follow()
        for sequence_id, stay in list(self.stays.items()):
            restated = stay.restated(sequence_id, self._key_space(stay.executor, stay.namespace))
            self.manager.restate(self.session, restated)
            self.follow()
        self.manager.all_restated(self.session)
        self.follow()

    def break_stream(self) -> None:
        """What was on its way is lost."""
        if self.session is not None:
            self.manager.end_session(self.session, self.now)
            self._forget_stream()
            self.follow()

    def restart_kvmanager(self) -> None:
        self.first_operation_id += OPERATIONS
        self.manager = KvManager(LEASE, self.first_operation_id)
        self._forget_stream()

    def is_connected(self, executor: SimExecutor) -> bool:
        known = self.manager.executors.get(executor.spec.executor_id)
        return known is not None and known.connected

    def register(self, executor: SimExecutor) -> None:
        """Operations of an older kvmanager are not done any more; the end of all others is told again."""
        executor.waiting = {i: move for i, move in executor.waiting.items() if i >= self.first_operation_id}
        self.manager.register(executor.spec, executor.inventory_blocks(), executor.epoch)
        self.follow()
        executor.unsent = list(executor.ended)
        self.report(executor)

    def unregister(self, executor: SimExecutor) -> None:
        if self.is_connected(executor):
            self.manager.unregister(executor.spec.executor_id)
            self._reclaim()

    def new_epoch(self, executor: SimExecutor) -> None:
        """The scheduler opens a new stream to an executor: its sequences are gone, what was on its way too."""
        executor.new_epoch()
        for sequence_id in [i for i, stay in self.stays.items() if stay.executor is executor]:
            if self.session is None:
                del self.stays[sequence_id]  # not stated again
            else:
                self._let_go(sequence_id)
        self.follow()

    def report(self, executor: SimExecutor, *, repeats: bool = False) -> None:
        if not self.is_connected(executor):
            return
        done, executor.unsent = executor.unsent, []
        failed = [i for i in done if not executor.ended[i]]
        for _ in range(1 + repeats):
            self.manager.report(executor.spec.executor_id, executor.epoch, executor.closed, done, failed)
            self._reclaim()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.manager.pass_time(self.now)
        self._reclaim()
        self._say(self.manager.answer_stale())

    # Everybody hears everything

    def settle(self) -> None:
        """Until nothing is on its way any more."""
        while self.inbox or any(executor.plans for executor in self.executors.values()):
            while self.inbox:
                self.inbox.popleft()()
            for executor in self.executors.values():
                while executor.plans:
                    executor.take_plan()

    def move_all(self, *, well: bool = True) -> None:
        self.settle()
        for executor in self.executors.values():
            for operation_id in list(executor.waiting):
                executor.move(operation_id, well=well)
            self.report(executor)

    def go_on(self, sequence_id: int, steps: int) -> None:
        """A sequence is computed further, and gets blocks for more."""
        self.settle()
        if sequence_id not in self.stays:
            return
        stay = self.stays[sequence_id]
        if sequence_id in stay.executor.running:
            stay.executor.compute(sequence_id, steps)
            self.hear_results(sequence_id)
        if not stay.leaving and len(stay.blocks) * SIZE < 800:
            self.extend(sequence_id, 256)
        self.settle()

    def finish(self) -> None:
        """All goes well from now on: everything is answered and comes back."""
        if self.session is None:
            self.open_stream()
        for executor in self.executors.values():
            if not self.is_connected(executor):
                self.register(executor)
        for _ in range(50):
            self.move_all()
            for sequence_id, stay in list(self.stays.items()):
                if not stay.leaving:
                    self.end(sequence_id)
            self.settle()
            for sequence_id in list(self.stays):
                self.release(sequence_id)
            self.pass_time(0.0)
        assert not self.asked
        assert not len(self.manager.waiting)
        assert self.manager.sequence_count == 0
        assert self.manager.verify() == []
        for found in self.manager.executors.values():
            assert not list(found.moves)
            assert all(pool.blocks.leased_count == 0 for pool in found.pools)

    def follow(self) -> None:
        """What the kvmanager has to say by itself goes to whom it concerns, where a stream is there."""
        for rebuilt in self.manager.take_restated():
            if rebuilt.session is self.session:
                self.inbox.append(partial(self._restated, rebuilt))
        self._say(self.manager.answer_due())
        for session, executor, moves in self.manager.take_moves():
            if session is self.session:
                self.inbox.append(partial(self._moving, self.executors[executor.spec.executor_id], moves))

    def _reclaim(self) -> None:
        self.manager.reclaim(self.now)
        self.follow()

    def _say(self, answers: list[Answer]) -> None:
        for session, answer in answers:
            assert session is self.session
            self.inbox.append(partial(self._placed, answer))

    def _key_space(self, executor: SimExecutor, namespace: str) -> KeySpace:
        return KeySpace(MODEL, namespace, str(executor.spec.policy))

    def _forget_stream(self) -> None:
        self.session = None
        self.inbox.clear()
        self.asked.clear()
        self.extending.clear()

    def _let_go(self, sequence_id: int) -> None:
        assert self.session is not None
        del self.stays[sequence_id]
        self.extending.discard(sequence_id)
        try:
            self.manager.release(self.session, sequence_id)
        except Refused:  # it was lost, or went with its executor; the word of it may still be on its way
            assert sequence_id not in self.session.holdings
        self._reclaim()

    # What the scheduler hears

    def _placed(self, answer: ReservationAnswer) -> None:
        tokens, namespace = self.asked.pop(answer.sequence_id)
        if answer.outcome != Outcome.GRANTED:
            return
        executor = self.executors[answer.executor_id]
        assert self.session is not None
        holding = self.session.holdings.get(answer.sequence_id)
        if holding is None or holding.epoch != executor.epoch:  # too late: its epoch is over
            if holding is not None:
                self.manager.release(self.session, answer.sequence_id)
                self.follow()
            return
        (blocks,) = (list(group.block_ids) for group in answer.blocks)
        running = Running(tokens[:], answer.cached_tokens, blocks[:])
        self.stays[answer.sequence_id] = Stay(
            executor,
            executor.epoch,
            namespace,
            blocks,
            list(answer.demotions),
            tokens,
            answer.cached_tokens,
            reported=len(tokens),
        )
        demotions = [(answer.sequence_id, answer.demotions)]
        executor.plans.append(Plan(enter=(answer.sequence_id, running), demotions=demotions))

    def _extended(self, answer: ExtensionAnswer) -> None:
        self.extending.discard(answer.sequence_id)
        stay = self.stays.get(answer.sequence_id)
        if stay is None or stay.leaving or answer.outcome != Outcome.GRANTED:
            return
        gained = [block for group in answer.blocks for block in group.block_ids]
        stay.blocks += gained
        stay.demotions += answer.demotions
        demotions = [(answer.sequence_id, answer.demotions)]
        stay.executor.plans.append(Plan(append=(answer.sequence_id, gained), demotions=demotions))

    def _moving(self, executor: SimExecutor, moves: list[Move]) -> None:
        executor.plans.append(Plan(operations=[move for move in moves if move.epoch == executor.epoch]))

    def _tell(self, executor: SimExecutor, epoch: int, plan: Plan) -> None:
        if executor.epoch == epoch:
            executor.plans.append(plan)

    def _restated(self, rebuilt: Rebuilt) -> None:
        if rebuilt.extension is not None:
            self._extended(rebuilt.extension)
        stay = self.stays.get(rebuilt.sequence_id)
        # An executor that came back says what is in a block before the step that writes it anew: whoever has it since
        # is lost, and computed again, rather than trusted.
        known = ("another epoch", "has other content")
        assert not rebuilt.problem or any(cause in rebuilt.problem for cause in known), rebuilt.problem
        if rebuilt.problem and stay is not None and not stay.leaving:
            self.end(rebuilt.sequence_id)
