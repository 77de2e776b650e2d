"""Who is next of those that wait: by priority with ageing, then by fairness between tenants, then by urgency.

A priority rises by one with every period of waiting, up to the highest one that waits. So a sequence's level, its
priority less the number of the period in which it arrived, never changes while it waits; and all levels from some
level on are one class, in which the tenant with the least virtual time is next. Within a tenant, whoever has to start
soonest is; those who have to at about the same time go by common beginnings of their prompts, which are then cached.
A choice costs O(levels + log tenants), however many wait.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from operator import attrgetter

from services.scheduler.fairness import Account
from services.scheduler.heap import SWEEP_FROM, LazyHeap
from services.scheduler.sequence import Phase, Request, Sequence

PREFIX_TOKENS = 32
"""Prompts that begin with the same so many tokens share cached blocks."""
SLOT_SECONDS = 1.0
"""Within such a span, start-by times count as equal."""


def is_gone(sequence: Sequence) -> bool:
    """Whether it waits no more."""
    return sequence.phase is not Phase.WAITING


def left_line(sequence: Sequence) -> bool:
    """Whether it waits no more, or no more in this order."""
    return sequence.promoted or is_gone(sequence)


class Line:
    """What one tenant waits for at one level, and its offer among those of other tenants there."""

    __slots__ = ("_groups", "_offers", "account", "count", "key", "level", "number", "tokens", "waiting")

    def __init__(self, account: Account, level: int, number: int, offers: list[tuple[float, int, Line]]) -> None:
        self.account, self.level, self.number = account, level, number
        self.waiting: LazyHeap[tuple[float, ...], Sequence] = LazyHeap(left_line)
        self.count = self.tokens = 0  # sequences and their tokens
        self._groups: dict[tuple[float, int], int] = {}  # first arrival, by start-by slot and beginning of the prompt
        self._offers = offers
        self.offer()

    def offer(self) -> None:
        """States the tenant's present virtual time. Needed where it fell: that it rose is noticed in `head`."""
        self.key = self.account.virtual_time
        heapq.heappush(self._offers, (self.key, self.number, self))

    def add(self, sequence: Sequence) -> None:
        request = sequence.request
        slot, group = request.start_by // SLOT_SECONDS, request.arrival
        if len(self._groups) > SWEEP_FROM + self.count:
            self._groups.clear()  # most are of times long past
        if len(sequence.token_ids) >= PREFIX_TOKENS:
            group = self._groups.setdefault((slot, hash(tuple(sequence.token_ids[:PREFIX_TOKENS]))), group)
        self.waiting.push((slot, group, request.start_by, request.arrival, sequence.choice), sequence)
        self.count += 1
        self.tokens += len(sequence.token_ids)


def head(offers: list[tuple[float, int, Line]]) -> Line | None:
    """The line whose tenant was served least. Brings old offers up to date on the way."""
    while offers:
        key, number, line = offers[0]
        if key != line.key:
            heapq.heappop(offers)  # a later offer took its place
        elif line.count == 0:
            heapq.heappop(offers)
            if line.account.lines.get(line.level) is line:
                del line.account.lines[line.level]
        elif (present := line.account.virtual_time) > key:
            line.key = present
            heapq.heapreplace(offers, (present, number, line))
        else:
            return line
    return None


def _second(offers: list[tuple[float, int, Line]]) -> Line | None:
    """The first line of another tenant than the head's."""
    first = offers[0][2]
    own = []
    while (line := head(offers)) is first:
        own.append(heapq.heappop(offers))
    for offer in own:
        heapq.heappush(offers, offer)
    return line


class FairOrder:
    """Sequences in that order. `now` in seconds never runs back."""

    def __init__(self, ageing_seconds: float) -> None:
        """`ageing_seconds`: the period of waiting that raises a priority by one."""
        self._period = ageing_seconds
        self._levels: dict[int, list[tuple[float, int, Line]]] = {}
        self._priorities: Counter[int] = Counter()
        self._numbers = itertools.count()
        self._reached = 0.0  # virtual time at the last choice

    def __len__(self) -> int:
        return self._priorities.total()

    def push(self, sequence: Sequence) -> None:
        request, account = sequence.request, sequence.request.account
        if account.queued_count == 0:
            account.lift_to(self._least())
        level = self._level(request)
        line = account.lines.get(level)
        if line is None:
            line = Line(account, level, next(self._numbers), self._levels.setdefault(level, []))
            account.lines[level] = line
        line.add(sequence)
        sequence.line = line
        account.queued_count += 1
        self._priorities[request.priority] += 1

    def peek(self, now: float, beside: Account | None = None) -> Sequence | None:
        """The next one, still held; `beside` a tenant, the next one of others in the same class."""
        if not self._priorities:
            return None
        first = self._first_level(max(self._priorities), now)
        lines = (line for level, line in self._heads(beside) if level >= first)
        best = min(lines, default=None, key=attrgetter("key", "number"))
        if best is None:
            return None
        return min(_first(line) for level, line in best.account.lines.items() if level >= first and line.count)[1]

    def pop(self, sequence: Sequence) -> None:
        """Takes out the one that `peek` returned."""
        assert sequence.line is not None
        self._reached = sequence.request.account.virtual_time
        sequence.line.waiting.pop()
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Counts one no more, which is out, or is about to end or to be promoted."""
        line, request = sequence.line, sequence.request
        assert line is not None
        sequence.line = None
        line.count -= 1
        line.tokens -= len(sequence.token_ids)
        request.account.queued_count -= 1
        self._priorities[request.priority] -= 1
        if not self._priorities[request.priority]:
            del self._priorities[request.priority]

    def priority(self, request: Request, now: float) -> int:
        """That of one which waits, raised by how long it has waited."""
        return min(max(self._priorities), self._level(request) + self._periods(now))

    def tokens_ahead(self, request: Request, tokens: int, now: float) -> int:
        """Tokens to compute before those of a request that is about to wait; it has `tokens` itself.

        Those of better classes, those of its tenant that have to start sooner, and of other tenants in its class what
        they are served until its tenant's turn has come for all of that.
        """
        account = request.account
        first = self._first_level(max([*self._priorities, request.priority]), now)
        own_class = min(self._level(request), first)
        better = own = 0
        others: dict[Account, int] = defaultdict(int)
        for level, line in self._lines():
            rank = min(level, first)
            if rank > own_class:
                better += line.tokens
            elif rank == own_class and line.account is not account:
                others[line.account] += line.tokens
            elif rank == own_class:
                own += sum(len(s.token_ids) for _, s in line.waiting if s.request.start_by <= request.start_by)
        turn = max(account.virtual_time, self._least()) + (own + tokens) / account.weight
        shared = (min(waiting, max(0.0, (turn - o.virtual_time) * o.weight)) for o, waiting in others.items())
        return better + own + round(sum(shared))

    def upcoming(self, count: int, now: float) -> Iterator[tuple[Sequence, str]]:
        """The next ones, as if no more came and nothing were answered meanwhile, and why none is sooner."""
        if not self._priorities:
            return
        highest = max(self._priorities)
        first = self._first_level(highest, now)
        classes: dict[int, dict[Account, list[Line]]] = defaultdict(lambda: defaultdict(list))
        for level, line in self._lines():
            classes[min(level, first)][line.account].append(line)
        for rank in sorted(classes, reverse=True):
            risen = rank + self._periods(now)
            behind = "" if rank == first else f"priority {risen} by now: those of priority {highest} go first"
            yield from _turns(classes[rank], count, behind)

    def _level(self, request: Request) -> int:
        return request.priority - self._periods(request.arrived_at)

    def _first_level(self, highest_priority: int, now: float) -> int:
        """From this level on, all have reached the highest priority."""
        return highest_priority - self._periods(now)

    def _periods(self, at: float) -> int:
        return int(at // self._period)

    def _least(self) -> float:
        """Virtual time of the tenant that was served least of those that wait; without any, of the last one chosen."""
        return min((line.key for _, line in self._heads()), default=self._reached)

    def _heads(self, beside: Account | None = None) -> list[tuple[int, Line]]:
        """The first line of each level, but for one tenant's."""
        found = []
        for level, offers in list(self._levels.items()):
            line = head(offers)
            if line is None:
                del self._levels[level]
            elif line.account is not beside:
                found.append((level, line))
            elif (second := _second(offers)) is not None:
                found.append((level, second))
        return found

    def _lines(self) -> list[tuple[int, Line]]:
        """All lines in which anything waits, each once."""
        lines = {line: level for level, offers in self._levels.items() for _, _, line in offers if line.count}
        return [(level, line) for line, level in lines.items()]


def _first(line: Line) -> tuple[tuple[float, ...], Sequence]:
    found = line.waiting.peek()
    assert found is not None
    return found


def _turns(tenants: dict[Account, list[Line]], count: int, behind: str) -> Iterator[tuple[Sequence, str]]:
    """One class in order. `behind` says why another class goes first, empty where none does."""
    heap = [(account.virtual_time, min(line.number for line in lines), account) for account, lines in tenants.items()]
    heapq.heapify(heap)
    least = heap[0][0]
    waiting = {
        account: heapq.nsmallest(count, itertools.chain.from_iterable(line.waiting for line in lines))
        for account, lines in tenants.items()
    }
    taken: Counter[Account] = Counter()
    while heap:
        virtual_time, number, account = heap[0]
        turn = taken[account]
        sequence = waiting[account][turn][1]
        taken[account] += 1
        if taken[account] < len(waiting[account]):
            heapq.heapreplace(heap, (virtual_time + len(sequence.token_ids) / account.weight, number, account))
        else:
            heapq.heappop(heap)
        if behind:
            yield sequence, behind
        elif turn:
            yield sequence, f"{turn} of its tenant go first"
        else:
            served = account.virtual_time - least
            yield sequence, f"its tenant was served {served:,.0f} more than another" if served >= 0.5 else ""
