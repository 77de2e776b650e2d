"""Who is next: preempted first, then by priority, then by arrival; what cannot meet its deadline comes last."""

from __future__ import annotations

from services.scheduler.heap import LazyHeap
from services.scheduler.sequence import Phase, Sequence

_Key = tuple[bool, int, int, int]


def order(sequence: Sequence) -> _Key:
    """Smaller is sooner."""
    request = sequence.request
    return (not sequence.preempted, -request.priority, request.arrival, sequence.choice)


def is_feasible(sequence: Sequence, now: float, prefill_tokens_per_second: float) -> bool:
    """Whether a first token could come before the deadline. Once false, it stays so."""
    deadline = sequence.request.deadline_at
    if deadline is None or prefill_tokens_per_second <= 0:
        return True
    return now + len(sequence.token_ids) / prefill_tokens_per_second <= deadline


class WaitingQueue:
    """Sequences of one model that wait for blocks. Those that ended meanwhile are skipped."""

    def __init__(self) -> None:
        self._feasible: LazyHeap[_Key, Sequence] = LazyHeap(_has_left)
        self._late: LazyHeap[_Key, Sequence] = LazyHeap(_has_left)

    def __len__(self) -> int:
        """Entries held, those of ended sequences included."""
        return len(self._feasible) + len(self._late)

    def push(self, sequence: Sequence) -> None:
        self._feasible.push(order(sequence), sequence)

    def peek(self, now: float, prefill_tokens_per_second: float) -> Sequence | None:
        """The next one, still queued."""
        while (first := self._feasible.peek()) is not None:
            if is_feasible(first[1], now, prefill_tokens_per_second):
                return first[1]
            self._late.push(first[0], self._feasible.pop())
        late = self._late.peek()
        return late[1] if late is not None else None

    def pop(self, sequence: Sequence) -> None:
        """Takes out the one that `peek` returned."""
        first = self._feasible.peek()
        (self._feasible if first is not None and first[1] is sequence else self._late).pop()


def _has_left(sequence: Sequence) -> bool:
    return sequence.phase is not Phase.WAITING
