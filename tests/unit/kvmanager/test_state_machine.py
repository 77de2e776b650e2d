"""Random histories: the kvmanager against a naive model, with the integrity check after each step."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.kvmanager.executors import ExecutorSpec, InventoryBlock
from services.kvmanager.holdings import Refused
from services.kvmanager.manager import KvManager
from services.kvmanager.placement import Outcome
from services.kvmanager.reservations import AllowedExecutor, ReservationAnswer
from services.kvmanager.waiting import Parked
from tests.unit.kvmanager.helpers import LEASE, executor, pool, reservation
from tests.unit.kvmanager.naive import NaiveExecutor, NaiveSequence

SIZE = 2
COUNTS = {"a": 7, "b": 5}
SPECS: dict[str, ExecutorSpec] = {name: executor(name, pool(count, SIZE)) for name, count in COUNTS.items()}

executors = st.sampled_from(sorted(COUNTS))
schedulers = st.sampled_from(["s", "t"])
sequences = st.integers(1, 2)
rarely = st.integers(0, 5)  # what draws it happens at 0 only, lest everything be lost all the time
prompts = st.builds(
    lambda shared, own, length: [0] * shared + [own] * length, st.integers(0, 6), st.integers(1, 2), st.integers(1, 7)
)


class Orphan(NamedTuple):
    """A sequence whose session ended."""

    order: int  # of its session
    lease_end: float
    sequence: NaiveSequence


class Waiting(NamedTuple):
    """A reservation that is answered later."""

    tokens: list[int]
    lookahead: int
    epochs: dict[str, int]  # of the executors allowed
    filler: NaiveSequence
    length: int  # that the filler has to compute


class KvManagerMachine(RuleBasedStateMachine):
    """Two executors, two schedulers that die and return, two sequence ids each."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.real = KvManager(LEASE)
        self.naive: dict[str, NaiveExecutor] = {}
        self.epochs = dict.fromkeys(COUNTS, 1)
        for name in COUNTS:
            self.register_anew(name)
        self.sessions = {name: self.real.open_session(name, self.now) for name in ("s", "t")}
        self.held: dict[tuple[str, int], NaiveSequence] = {}
        self.opened = 2  # sessions so far
        self.order = {"s": 1, "t": 2}  # of the present sessions
        self.orphans: list[Orphan] = []
        self.waiting: dict[tuple[str, int], Waiting] = {}  # in order of arrival

    # Sequences

    @rule(scheduler=schedulers, sequence=sequences, tokens=prompts, lookahead=st.integers(0, 4), only=executors)
    def reserve(self, scheduler: str, sequence: int, tokens: list[int], lookahead: int, only: str) -> None:
        if (scheduler, sequence) in self.held or (scheduler, sequence) in self.waiting:
            refused = self.ask(scheduler, sequence, tokens, lookahead, [only])
            assert refused is not None
            assert refused.outcome == Outcome.INVALID
            self.release(scheduler, sequence)
        answer = self.ask(scheduler, sequence, tokens, lookahead, [only])
        self.take(scheduler, sequence, tokens, lookahead, {only: self.epochs[only]}, answer)

    @rule(scheduler=schedulers, sequence=sequences, tokens=prompts)
    def reserve_anywhere(self, scheduler: str, sequence: int, tokens: list[int]) -> None:
        if (scheduler, sequence) in self.held or (scheduler, sequence) in self.waiting:
            self.release(scheduler, sequence)
        answer = self.ask(scheduler, sequence, tokens, 0, sorted(COUNTS))
        self.take(scheduler, sequence, tokens, 0, dict(self.epochs), answer)

    @rule(scheduler=schedulers, sequence=sequences, slots=st.integers(-1, 16))
    def extend(self, scheduler: str, sequence: int, slots: int) -> None:
        answer = self.real.extend(self.sessions[scheduler], sequence, slots)
        held = self.held.get((scheduler, sequence))
        if held is None or slots <= 0:
            assert answer.outcome == Outcome.INVALID
            return
        expected = held.executor.extend(held, slots)
        if isinstance(expected, str):
            assert answer.outcome.name == expected
        else:
            assert answer.outcome == Outcome.GRANTED
            assert [block for group in answer.blocks for block in group.block_ids] == expected

    @rule(scheduler=schedulers, sequence=sequences, step=st.sampled_from([1, 2, 3, 11]), token=st.integers(0, 1))
    def compute(self, scheduler: str, sequence: int, step: int, token: int) -> None:
        """A chunk of what is known, all of it, or else one more token each step."""
        held = self.held.get((scheduler, sequence))
        if held is None:
            with pytest.raises(Refused):
                self.real.progress(self.sessions[scheduler], sequence, step, [])
            return
        room = len(held.blocks) * SIZE
        left = len(held.tokens) - held.computed
        if left > step or step == 11:
            computed, new = held.computed + min(step, left), []
        else:
            steps = min(step - left, room - len(held.tokens))
            computed, new = len(held.tokens) + max(0, steps), [token] * (1 + max(0, steps))
        if computed > room:
            with pytest.raises(Refused):
                self.real.progress(self.sessions[scheduler], sequence, computed, new)
            return
        _, sealed = self.real.progress(self.sessions[scheduler], sequence, computed, new)
        assert [block.block_id for block in sealed] == held.executor.progress(held, computed, new)
        self.answer_due()

    @rule(scheduler=schedulers, sequence=sequences)
    def compute_backwards(self, scheduler: str, sequence: int) -> None:
        held = self.held.get((scheduler, sequence))
        if held is not None:
            with pytest.raises(Refused):
                self.real.progress(self.sessions[scheduler], sequence, held.computed - 1, [])

    @rule(scheduler=schedulers, sequence=sequences)
    def release(self, scheduler: str, sequence: int) -> None:
        held = self.held.pop((scheduler, sequence), None)
        if self.waiting.pop((scheduler, sequence), None) is not None:
            assert self.real.release(self.sessions[scheduler], sequence) == ""
        elif held is None:
            with pytest.raises(Refused):
                self.real.release(self.sessions[scheduler], sequence)
        else:
            self.real.release(self.sessions[scheduler], sequence)
            held.executor.release(held)
            self.answer_due()

    @rule(scheduler=schedulers, tokens=prompts, only=executors)
    def serve_whole(self, scheduler: str, tokens: list[int], only: str) -> None:
        """Reserved, computed and released in a row: fills the cache."""
        self.reserve(scheduler, 9, tokens, 0, only)
        self.compute(scheduler, 9, 11, 0)
        self.release(scheduler, 9)

    @rule(scheduler=schedulers, tokens=prompts, cut=st.integers(1, 6), only=executors)
    def serve_twins(self, scheduler: str, tokens: list[int], cut: int, only: str) -> None:
        """Two at once with a common prefix, which the first computes."""
        self.reserve(scheduler, 8, tokens[:cut], 0, only)
        self.reserve(scheduler, 9, tokens, 0, only)
        for sequence in (8, 9):
            if (scheduler, sequence) in self.held:
                self.compute(scheduler, sequence, 11, 0)
        for sequence in (8, 9):
            self.release(scheduler, sequence)

    # Losses

    @rule(scheduler=schedulers, dice=rarely)
    def lose_scheduler(self, scheduler: str, dice: int) -> None:
        """Its stream ends. Another process opens one of its own."""
        if dice:
            return
        self.real.end_session(self.sessions[scheduler], self.now)
        self.orphan(scheduler, self.now + LEASE)
        self.open_session(scheduler, f"{scheduler}{self.opened}")
        self.reclaim()

    @rule(scheduler=schedulers, dice=rarely)
    def reconnect_scheduler(self, scheduler: str, dice: int) -> None:
        """The same process opens a new stream and holds nothing any more."""
        if dice:
            return
        self.orphan(scheduler, self.now)
        self.open_session(scheduler, self.sessions[scheduler].scheduler_id)
        self.reclaim()

    @rule(seconds=st.sampled_from([1.0, LEASE]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.reclaim()

    @rule(name=executors)
    def open_epoch(self, name: str) -> None:
        if self.naive[name].connected:
            self.epochs[name] += 1
            self.real.report(name, self.epochs[name], [])
            self.naive[name].epoch = self.epochs[name]

    @rule(name=executors, back=st.integers(1, 2))
    def close_older_epoch(self, name: str, back: int) -> None:
        """Also late and repeated ones."""
        self.close_epoch(name, self.epochs[name] - back)

    @rule(name=executors, dice=rarely)
    def close_present_epoch(self, name: str, dice: int) -> None:
        if not dice:
            self.close_epoch(name, self.epochs[name])

    @rule(name=executors, dice=rarely)
    def lose_executor(self, name: str, dice: int) -> None:
        if not dice:
            self.real.unregister(name)
            self.naive[name].connected = False
            self.reclaim()

    @rule(name=executors, share=st.integers(1, 3))
    def executor_returns(self, name: str, share: int) -> None:
        """The same process, which confirms some of its content."""
        naive = self.naive[name]
        known = self.real.executors.get(name)
        if known is None:
            self.register_anew(name)
            return
        items = [(key, block) for key, block in known.pools[0].index.items() if block % share == 0]
        self.real.register(SPECS[name], [InventoryBlock(0, block, key) for key, block in items], self.epochs[name])
        naive.keep_only({block for _, block in items})
        naive.connected = True
        naive.closed_through = max(naive.closed_through, self.epochs[name] - 1)
        self.reclaim()

    @rule(name=executors, dice=rarely)
    def replace_executor(self, name: str, dice: int) -> None:
        """Its model was loaded again."""
        if dice:
            return
        self.drop_sequences(name)
        self.register_anew(name)
        self.answer_due()

    # What must hold

    @invariant()
    def books_are_sound(self) -> None:
        assert self.real.verify() == []

    @invariant()
    def blocks_are_where_the_model_has_them(self) -> None:
        for name, naive in self.naive.items():
            real = self.real.executors.get(name)
            if real is None:
                assert not naive.connected
                assert not naive.sequences
                continue
            blocks = real.pools[0].blocks
            assert blocks.free_order() == naive.free
            assert blocks.eviction_order() == naive.cached
            assert blocks.leased_count == naive.count - len(naive.free) - len(naive.cached)
        assert self.real.sequence_count == len(self.held) + len(self.orphans)
        assert len(self.real.waiting) == len(self.waiting)

    @invariant()
    def prefixes_outlive_their_continuations(self) -> None:
        for naive in self.naive.values():
            for place, block in enumerate(naive.cached):
                parent = naive.holding(naive.content[block][:-SIZE])
                assert parent not in naive.cached[:place]

    def ask(
        self, scheduler: str, sequence: int, tokens: list[int], lookahead: int, names: list[str]
    ) -> ReservationAnswer | None:
        allowed = [AllowedExecutor(name, self.epochs[name]) for name in names]
        return self.real.reserve(
            self.sessions[scheduler], reservation(sequence, tokens, lookahead=lookahead, on=allowed)
        )

    def take(
        self,
        scheduler: str,
        sequence: int,
        tokens: list[int],
        lookahead: int,
        epochs: dict[str, int],
        answer: ReservationAnswer | None,
    ) -> None:
        """Compares an answer with what the model says of the executor that it names, or of all where it names none."""
        key = scheduler, sequence
        usable = [
            name
            for name, epoch in epochs.items()
            if self.naive[name].connected
            and epoch >= self.naive[name].epoch
            and epoch > self.naive[name].closed_through
        ]
        if answer is None:
            behind = next(
                p.filler for p in self.real.waiting if p.wanted.sequence_id == sequence and self.is_of(p, scheduler)
            )
            assert behind is not None
            name = behind.holding.executor.spec.executor_id
            assert name in usable
            filler = self.naive[name].reserve(tokens, lookahead, epochs[name])
            assert isinstance(filler, tuple)
            assert filler[1] == behind.length
            self.waiting[key] = Waiting(tokens, lookahead, epochs, *filler)
        elif answer.outcome == Outcome.GRANTED:
            name = answer.executor_id
            assert name in usable
            expected = self.naive[name].reserve(tokens, lookahead, epochs[name])
            assert isinstance(expected, NaiveSequence)
            assert answer.cached_tokens == expected.computed < len(tokens)
            assert [block for group in answer.blocks for block in group.block_ids] == expected.blocks
            self.held[key] = expected
        else:
            refusals = {self.naive[name].reserve(tokens, lookahead, 0) for name in usable}
            assert all(isinstance(refusal, str) for refusal in refusals), f"{usable} had room"
            expected_name = "NO_EXECUTOR" if not usable else "NO_BLOCKS" if "NO_BLOCKS" in refusals else "NEVER_FITS"
            assert answer.outcome.name == expected_name

    def is_of(self, parked: Parked, scheduler: str) -> bool:
        return parked.session is self.sessions[scheduler]

    def answer_due(self) -> None:
        """What waited for something that has happened is answered, in the order in which it came."""
        due = {
            key: waiting
            for key, waiting in self.waiting.items()
            if waiting.filler not in waiting.filler.executor.sequences
            or not waiting.filler.is_open
            or waiting.filler.computed >= waiting.length
        }
        for key in due:
            del self.waiting[key]
        answers = {
            (next(name for name, mine in self.sessions.items() if mine is session), answer.sequence_id): answer
            for session, answer in self.real.answer_due()
        }
        assert answers.keys() <= due.keys()
        for (scheduler, sequence), waiting in due.items():
            answer = answers.get((scheduler, sequence))
            self.take(scheduler, sequence, waiting.tokens, waiting.lookahead, waiting.epochs, answer)

    def open_session(self, scheduler: str, name: str) -> None:
        self.opened += 1
        self.order[scheduler] = self.opened
        self.sessions[scheduler] = self.real.open_session(name, self.now)

    def orphan(self, scheduler: str, lease_end: float) -> None:
        mine = [key for key in self.held if key[0] == scheduler]
        for key in mine:
            self.held[key].is_open = False
        self.orphans += [Orphan(self.order[scheduler], lease_end, self.held.pop(key)) for key in mine]
        self.waiting = {key: waiting for key, waiting in self.waiting.items() if key[0] != scheduler}

    def reclaim(self) -> None:
        self.real.reclaim(self.now)
        for orphan in sorted(self.orphans, key=lambda orphan: orphan.order):
            naive = orphan.sequence.executor
            ended = orphan.sequence.epoch <= naive.closed_through or not naive.connected
            if orphan.lease_end <= self.now and ended:
                naive.release(orphan.sequence)
                self.orphans.remove(orphan)
        self.answer_due()

    def close_epoch(self, name: str, closed: int) -> None:
        if self.naive[name].connected:
            self.real.report(name, 0, [closed])
            self.naive[name].closed_through = max(self.naive[name].closed_through, closed)
            self.reclaim()

    def drop_sequences(self, name: str) -> None:
        gone = self.naive[name]
        gone.sequences = []
        self.held = {key: held for key, held in self.held.items() if held.executor is not gone}
        self.orphans = [orphan for orphan in self.orphans if orphan.sequence.executor is not gone]

    def register_anew(self, name: str) -> None:
        self.real.replace(SPECS[name], self.epochs[name]).settle([])
        self.naive[name] = NaiveExecutor(COUNTS[name], SIZE, self.epochs[name])


TestKvManager = KvManagerMachine.TestCase
TestKvManager.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
