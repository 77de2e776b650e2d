"""Who is next: preempted first, then by priority, then by arrival; what cannot meet its deadline comes last."""

from __future__ import annotations

import heapq

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
        self._heap: list[tuple[_Key, Sequence]] = []
        self._late: list[tuple[_Key, Sequence]] = []

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (order(sequence), sequence))

    def peek(self, now: float, prefill_tokens_per_second: float) -> Sequence | None:
        """The next one, still queued."""
        heap = self._heap
        while heap:
            sequence = heap[0][1]
            if sequence.phase is not Phase.WAITING:
                heapq.heappop(heap)
            elif not is_feasible(sequence, now, prefill_tokens_per_second):
                heapq.heappush(self._late, heapq.heappop(heap))
            else:
                return sequence
        while self._late and self._late[0][1].phase is not Phase.WAITING:
            heapq.heappop(self._late)
        return self._late[0][1] if self._late else None

    def pop(self, sequence: Sequence) -> None:
        """Takes out the one that `peek` returned."""
        heap = self._heap if self._heap and self._heap[0][1] is sequence else self._late
        heapq.heappop(heap)

    def drain(self) -> list[Sequence]:
        """All that wait, in order; the queue is empty afterwards."""
        entries = sorted(self._heap + self._late, key=lambda entry: entry[0])
        self._heap, self._late = [], []
        return [sequence for _, sequence in entries if sequence.phase is Phase.WAITING]
