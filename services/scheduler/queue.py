"""What waits for blocks at one model: who ran or was promoted, then the fair order; what is too late comes last."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Protocol

from services.scheduler.fairness import Account
from services.scheduler.heap import LazyHeap
from services.scheduler.order import FairOrder, is_gone
from services.scheduler.sequence import Request, Sequence

_Key = tuple[bool, int, int, int]
PREEMPTED = "goes on after it was preempted"
PROMOTED = "has to start now: got the place of one of lower priority"


def order(sequence: Sequence) -> _Key:
    """Preempted or promoted, then by priority, then by arrival: smaller is sooner."""
    request = sequence.request
    return (not (sequence.preempted or sequence.promoted), -request.priority, request.arrival, sequence.choice)


def is_feasible(sequence: Sequence, now: float, prompt_speed: float) -> bool:
    """Whether a first token could come before the deadline, at so many tokens of prefill per second."""
    deadline = sequence.request.deadline_at
    return deadline is None or now + len(sequence.token_ids) / prompt_speed <= deadline


class WaitingQueue(Protocol):
    """Sequences of one model that wait for blocks. `now` in seconds never runs back."""

    def __len__(self) -> int:
        """Sequences held. Of those that ended, some may still be among them."""
        ...

    def push(self, sequence: Sequence) -> None: ...

    def peek(self, now: float, prompt_speed: float) -> Sequence | None:
        """The next one, still queued."""
        ...

    def peek_beside(self, account: Account, now: float, prompt_speed: float) -> Sequence | None:
        """The next one of another tenant that would have been next without this one's."""
        ...

    def pop(self, sequence: Sequence) -> None:
        """Takes out the one that `peek` or `peek_beside` returned."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Takes out one that is about to end; one that is not queued is none of its business."""
        ...

    def promote(self, sequence: Sequence) -> None:
        """Lets one that the fair order holds go before all others of its priority, from now on."""
        ...

    def reason(self, sequence: Sequence, now: float) -> str:
        """Why the one that `peek` returned is next."""
        ...

    def upcoming(self, count: int, now: float) -> Iterator[tuple[Sequence, str]]:
        """At least the next `count`, and why others go before; empty where only room is missing."""
        ...

    def tokens_ahead(self, request: Request, tokens: int, now: float) -> int:
        """Tokens to compute before those of a request that is about to be queued; it has `tokens` itself."""
        ...


class FairQueue:
    """The fair order between those that hold progress already and those that are too late."""

    def __init__(self, ageing_seconds: float) -> None:
        self._first: LazyHeap[_Key, Sequence] = LazyHeap(is_gone)
        self._fair = FairOrder(ageing_seconds)
        self._late: LazyHeap[_Key, Sequence] = LazyHeap(is_gone)

    def __len__(self) -> int:
        return len(self._first) + len(self._fair) + len(self._late)

    def push(self, sequence: Sequence) -> None:
        if sequence.preempted or sequence.promoted:
            self._first.push(order(sequence), sequence)
        else:
            self._fair.push(sequence)

    def peek(self, now: float, prompt_speed: float) -> Sequence | None:
        while (first := self._first.peek()) is not None:
            if is_feasible(first[1], now, prompt_speed):
                return first[1]
            self._late.push(first[0], self._first.pop())
        while (sequence := self._fair.peek(now)) is not None:
            if is_feasible(sequence, now, prompt_speed):
                return sequence
            self._fair.pop(sequence)
            self._late.push(order(sequence), sequence)
        late = self._late.peek()
        return late[1] if late is not None else None

    def peek_beside(self, account: Account, now: float, prompt_speed: float) -> Sequence | None:
        found = self._fair.peek(now, account)
        return found if found is not None and is_feasible(found, now, prompt_speed) else None

    def pop(self, sequence: Sequence) -> None:
        if sequence.line is not None:
            self._fair.pop(sequence)
        else:
            first = self._first.peek()
            (self._first if first is not None and first[1] is sequence else self._late).pop()

    def remove(self, sequence: Sequence) -> None:
        if sequence.line is not None:
            self._fair.remove(sequence)

    def promote(self, sequence: Sequence) -> None:
        self._fair.remove(sequence)
        sequence.promoted = True
        self._first.push(order(sequence), sequence)

    def reason(self, sequence: Sequence, now: float) -> str:
        request = sequence.request
        if sequence.line is None and sequence.preempted:
            return PREEMPTED
        if sequence.line is None and sequence.promoted:
            return PROMOTED
        if sequence.line is None:
            return "too late for its deadline, but nothing else waits"
        own, priority = request.priority, self._fair.priority(request, now)
        aged = f", raised from {own}," if priority != own else ""
        served = f"{request.account.virtual_time:,.0f}"
        return f"priority {priority}{aged} is the highest, and its tenant was served least: {served}"

    def upcoming(self, count: int, now: float) -> Iterator[tuple[Sequence, str]]:
        yield from ((sequence, "") for _, sequence in heapq.nsmallest(count, self._first))
        yield from self._fair.upcoming(count, now)
        yield from (
            (sequence, "cannot meet its deadline: goes last") for _, sequence in heapq.nsmallest(count, self._late)
        )

    def tokens_ahead(self, request: Request, tokens: int, now: float) -> int:
        return sum(len(s.token_ids) for _, s in self._first) + self._fair.tokens_ahead(request, tokens, now)


class ArrivalQueue:
    """First come, first served, whatever the priority, the tenant or the deadline; preempted ones first."""

    def __init__(self) -> None:
        self._heap: LazyHeap[tuple[bool, int, int], Sequence] = LazyHeap(is_gone)

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, sequence: Sequence) -> None:
        self._heap.push((not sequence.preempted, sequence.request.arrival, sequence.choice), sequence)

    def peek(self, now: float, prompt_speed: float) -> Sequence | None:
        first = self._heap.peek()
        return first[1] if first is not None else None

    def peek_beside(self, account: Account, now: float, prompt_speed: float) -> Sequence | None:
        """Nobody goes before whoever came first."""
        return None

    def pop(self, sequence: Sequence) -> None:
        self._heap.pop()

    def remove(self, sequence: Sequence) -> None:
        """It is skipped when it comes up."""

    def promote(self, sequence: Sequence) -> None:
        """Nobody goes before whoever came first."""

    def reason(self, sequence: Sequence, now: float) -> str:
        return PREEMPTED if sequence.preempted else "came first"

    def upcoming(self, count: int, now: float) -> Iterator[tuple[Sequence, str]]:
        for number, (_, sequence) in enumerate(heapq.nsmallest(count, self._heap)):
            yield sequence, f"{number} came before" if number else ""

    def tokens_ahead(self, request: Request, tokens: int, now: float) -> int:
        return sum(len(waiting.token_ids) for _, waiting in self._heap)
