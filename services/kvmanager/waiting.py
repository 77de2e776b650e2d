"""Reservations that are answered later: another sequence computes their prefix, or it comes up from a lower tier."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from services.kvmanager.holdings import Holding, Session
from services.kvmanager.matching import Filler
from services.kvmanager.moves import Move
from services.kvmanager.reservations import Reservation


@dataclass(slots=True, eq=False)
class Parked:
    """A reservation that holds nothing and waits: for one filler, or for some moves."""

    session: Session
    wanted: Reservation
    number: int  # in order of arrival
    filler: Filler | None = None
    moves: set[int] = field(default_factory=set)  # operation ids
    seen: int | None = None  # how far what it waits for had come at the last look

    @property
    def key(self) -> tuple[Session, int]:
        return self.session, self.wanted.sequence_id

    @property
    def come(self) -> int:
        """How far what it waits for has come; grows."""
        return -len(self.moves) if self.filler is None else self.filler.holding.computed


class WaitingRoom:
    """Owns what is parked. What is due leaves it and is tried again, in the order in which it came.

    Whatever a reservation waits for may outlive it: who is no longer parked is passed over.
    """

    def __init__(self) -> None:
        self._parked: dict[tuple[Session, int], Parked] = {}  # in order of arrival
        self._by_filler: dict[Holding, list[tuple[int, int, Parked]]] = {}  # heaps by the length that is waited for
        self._by_move: dict[int, list[Parked]] = {}
        self._due: list[Parked] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._parked)

    def __iter__(self) -> Iterator[Parked]:
        return iter(self._parked.values())

    def __contains__(self, key: tuple[Session, int]) -> bool:
        return key in self._parked

    def park_behind(self, session: Session, wanted: Reservation, filler: Filler) -> None:
        """Until the filler has computed that far, or is gone."""
        parked = Parked(session, wanted, next(self._numbers), filler)
        self._parked[parked.key] = parked
        heapq.heappush(self._by_filler.setdefault(filler.holding, []), (filler.length, parked.number, parked))

    def park_for(self, session: Session, wanted: Reservation, moves: Iterable[Move]) -> None:
        """Until these moves are over."""
        parked = Parked(session, wanted, next(self._numbers), moves={move.operation_id for move in moves})
        self._parked[parked.key] = parked
        for operation_id in parked.moves:
            self._by_move.setdefault(operation_id, []).append(parked)

    def advanced(self, holding: Holding) -> None:
        """A sequence computed more."""
        waiting = self._by_filler.get(holding)
        while waiting and waiting[0][0] <= holding.computed:
            self._due.append(heapq.heappop(waiting)[-1])
        if waiting is not None and not waiting:
            del self._by_filler[holding]

    def left(self, holding: Holding) -> None:
        """A sequence gave its blocks back."""
        self._due += [parked for _, _, parked in self._by_filler.pop(holding, ())]

    def moved(self, operation_ids: Iterable[int]) -> None:
        """Moves are over, well or not."""
        for operation_id in operation_ids:
            for parked in self._by_move.pop(operation_id, ()):
                parked.moves.discard(operation_id)
                if not parked.moves:
                    self._due.append(parked)

    def closed(self, session: Session) -> None:
        """A stream ended: nobody waits for its answers any more, and nothing says how far its sequences come."""
        for holding in session.holdings.values():
            self.left(holding)
        for key in [key for key in self._parked if key[0] is session]:
            del self._parked[key]

    def cancel(self, session: Session, sequence_id: int) -> bool:
        """Whether that reservation was parked; it is no more."""
        return self._parked.pop((session, sequence_id), None) is not None

    def take_due(self) -> list[Parked]:
        """Those that need wait no longer."""
        due, self._due = self._due, []
        return [parked for parked in sorted(due, key=lambda parked: parked.number) if self._take(parked)]

    def take_stale(self) -> list[Parked]:
        """Those for which nothing happened since the last call: a filler may be paused for long, an executor hang."""
        stale = [parked for parked in self if parked.seen == parked.come]
        for parked in self:
            parked.seen = parked.come
        return [parked for parked in stale if self._take(parked)]

    def _take(self, parked: Parked) -> bool:
        """Whether it was still parked; it is no more."""
        if self._parked.get(parked.key) is not parked:
            return False
        del self._parked[parked.key]
        return True
