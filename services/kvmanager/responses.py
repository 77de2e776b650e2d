"""What schedulers are told: one message each, gathered while something is applied to the core."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from quire.v1 import kvmanager_pb2
from services.kvmanager import messages
from services.kvmanager.holdings import Sealed, Session
from services.kvmanager.manager import KvManager
from services.kvmanager.placement import Outcome
from services.kvmanager.reservations import ExtensionAnswer, ReservationAnswer

log = logging.getLogger("quire.kvmanager")


class Responses:
    """Messages by session. `finish` adds what the core has to say of itself; it is called once, at the end."""

    def __init__(self, manager: KvManager) -> None:
        self._manager = manager
        self._messages: dict[Session, kvmanager_pb2.ReserveResponse] = {}
        self._touched: dict[Session, dict[str, None]] = {}
        self._sealed: dict[Session, dict[str, list[Sealed]]] = {}

    def __iter__(self) -> Iterator[tuple[Session, kvmanager_pb2.ReserveResponse]]:
        """The messages that say something."""
        return ((session, message) for session, message in self._messages.items() if message.ByteSize())

    def to(self, session: Session) -> kvmanager_pb2.ReserveResponse:
        """The message for a session, to be added to."""
        return self._messages.setdefault(session, kvmanager_pb2.ReserveResponse())

    def touched(self, session: Session) -> dict[str, None]:
        """Executors whose space a session may be told, in order."""
        return self._touched.setdefault(session, {})

    def add_sealed(self, session: Session, executor_id: str, blocks: list[Sealed]) -> None:
        if blocks:
            self._sealed.setdefault(session, {}).setdefault(executor_id, []).extend(blocks)

    def add_answer(self, session: Session, answer: ReservationAnswer) -> None:
        if answer.outcome == Outcome.GRANTED:
            self.touched(session)[answer.executor_id] = None
        elif answer.outcome == Outcome.INVALID:
            log_refusal("reservation", session, answer.sequence_id, answer.reasons[0])
        self.to(session).reservations.append(messages.write_reservation(answer))

    def add_answers(self, answers: Iterable[tuple[Session, ReservationAnswer]]) -> None:
        for session, answer in answers:
            self.add_answer(session, answer)

    def add_extension(self, session: Session, answer: ExtensionAnswer) -> None:
        if answer.problem:
            log_refusal("extension", session, answer.sequence_id, answer.problem)
        if answer.blocks:
            self.touched(session)[session.holdings[answer.sequence_id].executor.spec.executor_id] = None
        self.to(session).extensions.append(messages.write_extension(answer))

    def finish(self) -> None:
        """Adds what became due by all that was applied: answers, restated sequences, moves, space."""
        manager = self._manager
        for rebuilt in manager.take_restated():
            self.touched(rebuilt.session)[rebuilt.executor_id] = None
            self.add_sealed(rebuilt.session, rebuilt.executor_id, rebuilt.sealed)
            if rebuilt.extension is not None:
                self.add_extension(rebuilt.session, rebuilt.extension)
            if rebuilt.problem:
                self.to(rebuilt.session).lost_sequence_ids.append(rebuilt.sequence_id)
                extra = {"sequence_id": rebuilt.sequence_id, "problem": rebuilt.problem}
                log.warning("a restated sequence is lost", extra=extra)
        self.add_answers(manager.answer_due())
        for executor_id, executor in manager.executors.items():
            if executor.has_lower_tiers and executor.moves.take_freed() and executor.scheduler is not None:
                self.touched(executor.scheduler)[executor_id] = None
        for session, executor, moves in manager.take_moves():
            self.to(session).operations.extend(messages.write_moves(executor, moves))
        for session, by_executor in self._sealed.items():
            self.to(session).sealed.extend(messages.write_sealed(name, blocks) for name, blocks in by_executor.items())
        for session, touched in self._touched.items():
            self.to(session).space.extend(
                messages.write_space(manager.executors[name])
                for name in touched
                if name in manager.executors  # a disconnected one leaves with its last sequence
            )


def log_refusal(what: str, session: Session, sequence_id: int, problem: str) -> None:
    log.warning(
        "%s refused",
        what,
        extra={"scheduler_id": session.scheduler_id, "sequence_id": sequence_id, "problem": problem},
    )
