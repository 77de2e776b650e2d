"""One message of a scheduler, applied to the core in the order of its fields, and its answer."""

from __future__ import annotations

import logging

from quire.v1 import kvmanager_pb2
from services.kvmanager import messages
from services.kvmanager.holdings import Refused, Sealed, Session
from services.kvmanager.manager import KvManager
from services.kvmanager.placement import Outcome
from services.kvmanager.reservations import ExtensionAnswer

log = logging.getLogger("quire.kvmanager")


def apply_request(
    manager: KvManager, session: Session, request: kvmanager_pb2.ReserveRequest
) -> kvmanager_pb2.ReserveResponse | None:
    """The answer, None where there is nothing to say. What is refused changes nothing and leaves a log line."""
    touched: dict[str, None] = {}  # executors whose space may have changed, in order
    sealed: dict[str, list[Sealed]] = {}
    response = kvmanager_pb2.ReserveResponse()

    for sequence_id in request.released_sequence_ids:
        try:
            touched[manager.release(session, sequence_id)] = None
        except Refused as problem:
            _log_refusal("release", session, sequence_id, str(problem))

    for progress in request.progress:
        try:
            executor_id, blocks = manager.progress(
                session, progress.sequence_id, progress.computed_length, progress.token_ids[:]
            )
        except Refused as problem:
            _log_refusal("progress", session, progress.sequence_id, str(problem))
        else:
            if blocks:
                sealed.setdefault(executor_id, []).extend(blocks)

    for extension in _extend(manager, session, request):
        if extension.problem:
            _log_refusal("extension", session, extension.sequence_id, extension.problem)
        if extension.blocks:
            touched[session.holdings[extension.sequence_id].executor.spec.executor_id] = None
        response.extensions.append(messages.write_extension(extension))

    for message in request.reservations:
        answer = manager.reserve(session, messages.read_reservation(message))
        if answer.outcome == Outcome.GRANTED:
            touched[answer.executor_id] = None
        elif answer.outcome == Outcome.INVALID:
            _log_refusal("reservation", session, answer.sequence_id, answer.reasons[0])
        response.reservations.append(messages.write_reservation(answer))

    response.sealed.extend(messages.write_sealed(executor_id, blocks) for executor_id, blocks in sealed.items())
    response.space.extend(
        messages.write_space(manager.executors[executor_id])
        for executor_id in touched
        if executor_id in manager.executors  # a disconnected one leaves with its last sequence
    )
    return response if response.ByteSize() else None


def _extend(manager: KvManager, session: Session, request: kvmanager_pb2.ReserveRequest) -> list[ExtensionAnswer]:
    ids, counts = request.extend_sequence_ids, request.extend_token_counts
    if len(ids) != len(counts):
        problem = f"extend_token_counts: {len(counts)} for {len(ids)} sequences"
        return [ExtensionAnswer(sequence_id, Outcome.INVALID, problem=problem) for sequence_id in ids]
    return [manager.extend(session, *wanted) for wanted in zip(ids, counts, strict=True)]


def _log_refusal(what: str, session: Session, sequence_id: int, problem: str) -> None:
    log.warning(
        "%s refused",
        what,
        extra={"scheduler_id": session.scheduler_id, "sequence_id": sequence_id, "problem": problem},
    )
