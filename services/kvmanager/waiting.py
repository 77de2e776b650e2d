"""Reservations that are answered later: another sequence computes their prefix, or it comes up from a lower tier."""

from __future__ import annotations

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
    filler: Filler | None = None
    moves: set[int] = field(default_factory=set)  # operation ids
    seen: int = -1  # the filler's computed length at the last look


class WaitingRoom:
    """Owns what is parked. What is due leaves it and is tried again, in the order in which it came."""

    def __init__(self) -> None:
        self._parked: dict[Parked, None] = {}  # in order of arrival
        self._by_filler: dict[Holding, list[Parked]] = {}
        self._due: dict[Parked, None] = {}

    def __len__(self) -> int:
        return len(self._parked)

    def __iter__(self) -> Iterator[Parked]:
        return iter(self._parked)

    def __contains__(self, key: tuple[Session, int]) -> bool:
        session, sequence_id = key
        return any(p.session is session and p.wanted.sequence_id == sequence_id for p in self._parked)

    def park_behind(self, session: Session, wanted: Reservation, filler: Filler) -> None:
        """Until the filler has computed that far, or is gone."""
        parked = Parked(session, wanted, filler)
        self._parked[parked] = None
        self._by_filler.setdefault(filler.holding, []).append(parked)

    def park_for(self, session: Session, wanted: Reservation, moves: Iterable[Move]) -> None:
        """Until these moves are over."""
        self._parked[Parked(session, wanted, moves={move.operation_id for move in moves})] = None

    def advanced(self, holding: Holding) -> None:
        """A sequence computed more."""
        waiting = self._by_filler.get(holding)
        if waiting:
            due = [p for p in waiting if p.filler is not None and p.filler.length <= holding.computed]
            self._due.update(dict.fromkeys(due))
            self._by_filler[holding] = [p for p in waiting if p not in self._due]

    def left(self, holding: Holding) -> None:
        """A sequence gave its blocks back."""
        self._due.update(dict.fromkeys(self._by_filler.pop(holding, ())))

    def moved(self, operation_ids: Iterable[int]) -> None:
        """Moves are over, well or not."""
        over = set(operation_ids)
        for parked in self._parked:
            if parked.moves & over:
                parked.moves -= over
                if not parked.moves:
                    self._due[parked] = None

    def closed(self, session: Session) -> None:
        """A stream ended: nobody waits for its answers any more, and nothing says how far its sequences come."""
        for holding in session.holdings.values():
            self.left(holding)
        for parked in [p for p in self._parked if p.session is session]:
            self._forget(parked)

    def cancel(self, session: Session, sequence_id: int) -> bool:
        """Whether that reservation was parked; it is no more."""
        for parked in self._parked:
            if parked.session is session and parked.wanted.sequence_id == sequence_id:
                self._forget(parked)
                return True
        return False

    def take_due(self) -> list[Parked]:
        """Those that need wait no longer."""
        due, self._due = sorted(self._due, key=list(self._parked).index), {}
        for parked in due:
            self._forget(parked)
        return due

    def take_stale(self) -> list[Parked]:
        """Those whose filler computed nothing since the last call: it may be paused for long."""
        stale = []
        for parked in list(self._parked):
            if parked.filler is None:
                continue
            if parked.seen == parked.filler.holding.computed:
                stale.append(parked)
                self._forget(parked)
            parked.seen = parked.filler.holding.computed
        return stale

    def _forget(self, parked: Parked) -> None:
        del self._parked[parked]
        self._due.pop(parked, None)
        if parked.filler is not None and (waiting := self._by_filler.get(parked.filler.holding)) is not None:
            if parked in waiting:
                waiting.remove(parked)
            if not waiting:
                del self._by_filler[parked.filler.holding]
