"""One message of a scheduler, applied to the core in the order of its fields, and its answer."""

from __future__ import annotations

from quire.v1 import kvmanager_pb2
from services.kvmanager import messages
from services.kvmanager.holdings import Refused, Session
from services.kvmanager.manager import KvManager
from services.kvmanager.placement import Outcome
from services.kvmanager.reservations import ExtensionAnswer, add_granted
from services.kvmanager.responses import Responses, log_refusal


def apply_request(manager: KvManager, session: Session, request: kvmanager_pb2.ReserveRequest) -> Responses:
    """The answers, to this scheduler and to others whose reservations waited for what this message did.

    What is refused changes nothing and leaves a log line.
    """
    loads = messages.read_loads(request.loads)
    responses = Responses(manager)
    touched = responses.touched(session)

    for held in request.held:
        manager.restate(session, messages.read_held(held))
    if request.all_held_stated:
        touched.update(dict.fromkeys(manager.all_restated(session)))

    returning = {i: session.holdings.get(i) for i in request.returning_sequence_ids}
    for sequence_id in request.released_sequence_ids:
        try:
            touched[manager.release(session, sequence_id)] = None
            if (released := returning.get(sequence_id)) is not None:
                released.send_down()
        except Refused as problem:
            log_refusal("release", session, sequence_id, str(problem))

    for progress in request.progress:
        try:
            executor_id, blocks = manager.progress(
                session, progress.sequence_id, progress.computed_length, progress.token_ids[:]
            )
        except Refused as problem:
            log_refusal("progress", session, progress.sequence_id, str(problem))
            continue
        if executor_id:
            responses.add_sealed(session, executor_id, blocks)
            if manager.executors[executor_id].spec.policy.colder:
                touched[executor_id] = None  # hot blocks come free as a sequence grows

    for extension in _extend(manager, session, request):
        responses.add_extension(session, extension)

    for message in request.reservations:
        wanted = messages.read_reservation(message, loads)
        answer = manager.reserve(session, wanted)
        if answer is not None:
            add_granted(loads, answer, len(wanted.tokens) - answer.cached_tokens)
            responses.add_answer(session, answer)
    responses.finish()
    return responses


def _extend(manager: KvManager, session: Session, request: kvmanager_pb2.ReserveRequest) -> list[ExtensionAnswer]:
    ids, counts = request.extend_sequence_ids, request.extend_token_counts
    if len(ids) != len(counts):
        problem = f"extend_token_counts: {len(counts)} for {len(ids)} sequences"
        return [ExtensionAnswer(sequence_id, Outcome.INVALID, problem=problem) for sequence_id in ids]
    answers = [manager.extend(session, *wanted) for wanted in zip(ids, counts, strict=True)]
    return [answer for answer in answers if answer is not None]
