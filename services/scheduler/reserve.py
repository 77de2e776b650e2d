"""What to ask of the kvmanager, and what its answers change.

Progress before releases, releases before extensions, extensions before forks, forks before admissions: within one
message the kvmanager frees first and gives afterwards.
"""

from __future__ import annotations

from itertools import chain

from quire.v1 import kvmanager_pb2, types_pb2
from services.common.errors import QuireError, Reason
from services.common.limits import MESSAGE_TOKENS
from services.scheduler.decisions import Admission
from services.scheduler.expected import expect
from services.scheduler.lifecycle import count_slots, fail_request, finish, place, wait_again
from services.scheduler.loads import state_loads
from services.scheduler.places import BELOW_SHARE, asked_places, takes_place
from services.scheduler.queue import order
from services.scheduler.restate import lose
from services.scheduler.room import asked_tokens, queue_room
from services.scheduler.sequence import Phase, Sequence
from services.scheduler.speculation.credit import likely_drafts, likely_length
from services.scheduler.state import UNLIMITED, Asked, Executor, Model, State

GRANTED = kvmanager_pb2.RESERVATION_OUTCOME_GRANTED
NO_BLOCKS = kvmanager_pb2.RESERVATION_OUTCOME_NO_BLOCKS
NEVER_FITS = kvmanager_pb2.RESERVATION_OUTCOME_NEVER_FITS
NO_EXECUTOR = kvmanager_pb2.RESERVATION_OUTCOME_NO_EXECUTOR

UNREGISTERED_RETRY_SECONDS = 0.025
"""An executor tells the kvmanager of its new epoch by itself; a reservation may be there first."""
QUIET_RETRY_SECONDS = 0.5
"""Refused although nothing of ours will be released: a lease may run out unannounced."""
Ask = tuple[kvmanager_pb2.Reservation, list[Executor]]
"""A reservation and where it may go."""


def want_blocks(state: State, sequence: Sequence, ahead: int) -> None:
    """Asks for blocks ahead of need: the likely length by what is granted, and `ahead` more tokens if usable."""
    wanted = max(likely_length(sequence) + ahead, sequence.slots_held + 1)
    sequence.slots_asked = max(sequence.slots_held, min(sequence.length_limit, wanted))
    state.extends.append(sequence)


def want_for_drafts(state: State, executor: Executor, sequence: Sequence) -> None:
    """Asks for blocks where drafts may come to need them before it is granted steps again."""
    slots, limits = sequence.slots_held, sequence.draft_limits
    if slots >= sequence.length_limit or sequence.slots_asked > slots:
        return
    next_steps = executor.grant_steps * (1 + likely_drafts(sequence, limits[-1] if limits else 0))
    ahead = max(state.limits.lookahead_tokens, next_steps) + executor.grant_steps
    if slots - likely_length(sequence) < ahead:
        want_blocks(state, sequence, ahead)


def reserve(state: State, now: float) -> list[kvmanager_pb2.ReserveRequest]:
    """The next messages to the kvmanager; none where there is nothing to say. Counts them as sent."""
    if not state.kv_connected:
        return []
    messages = []
    message = kvmanager_pb2.ReserveRequest()
    if state.releases:
        if state.progress and not {stay for stay, _, _ in state.progress}.isdisjoint(state.releases):
            # Applied in the order of its fields, one message would release before the last blocks count as ready.
            messages.append(kvmanager_pb2.ReserveRequest())
            _say_progress(state, messages[0])
        message.released_sequence_ids.extend(state.releases)
        message.returning_sequence_ids.extend(state.keeps)
        state.releases, state.keeps = [], []
        _space_appeared(state, state.executors)
    _say_progress(state, message)
    _extend(state, message)
    asks = [*_ask_forks(state), *_admissions(state, now)]
    executors = dict.fromkeys(chain.from_iterable(allowed for _, allowed in asks))
    loads = state_loads(list(executors))
    places: dict[Executor, int] = {}
    tokens = 0
    for reservation, allowed in asks:
        tokens += len(reservation.token_ids)
        if tokens > MESSAGE_TOKENS and message.reservations:
            messages.append(message)
            message, tokens = kvmanager_pb2.ReserveRequest(), len(reservation.token_ids)
        if not message.reservations:
            message.loads.MergeFrom(loads)
        if len(allowed) < len(executors):
            places = places or {executor: place for place, executor in enumerate(executors)}
            reservation.load_indexes.extend(places[executor] for executor in allowed)
        message.reservations.append(reservation)
    if message.ByteSize():
        messages.append(message)
    return messages


def _say_progress(state: State, message: kvmanager_pb2.ReserveRequest) -> None:
    for stay, computed, news in state.progress:
        message.progress.add(sequence_id=stay, computed_length=computed, token_ids=news)
    state.progress = []


def _extend(state: State, message: kvmanager_pb2.ReserveRequest) -> None:
    wanting, state.extends = state.extends, []
    for executor in state.executors:
        if executor.has_space:
            executor.has_space = False
            starved = sorted(executor.starved.values(), key=order)
            executor.starved.clear()
            for sequence in starved:
                want_blocks(state, sequence, state.limits.lookahead_tokens)
    wanting, state.extends = state.extends + wanting, []
    for sequence in wanting:
        if sequence.executor is not None and sequence.slots_asked > sequence.slots_held:  # not gone meanwhile
            message.extend_sequence_ids.append(sequence.sequence_id)
            message.extend_token_counts.append(sequence.slots_asked)


def _admissions(state: State, now: float) -> list[Ask]:
    """Reservations for the heads of the queues, as far as executors have room for sequences."""
    if not state.may_admit:
        return []
    state.may_admit = False
    reservations = []
    for name, model in state.models.items():
        executors = _candidates(state.serving(name)) if len(model.queue) else []
        if not executors:
            continue
        open_ones = [e for e in executors if state.limits.policy.admits(e)]
        room = UNLIMITED if state.limits.policy.gathers else _prompt_room(state, model, open_ones)
        speed = max(executor.step_time.prompt_speed for executor in executors)
        asked = asked_places(state, model)
        while len(model.queue) and model.asked_count < model.window and room > 0:
            open_ones = [e for e in open_ones if e.free_sequences > 0]
            head = model.queue.peek(now, speed) if open_ones else None
            if head is None:
                break
            sequence, allowed = head, open_ones
            if sequence.preempted:
                allowed = [e for e in open_ones if _fits(state, sequence, e)]
            elif state.limits.policy.keeps_places:
                found = takes_place(model, head, open_ones, asked, now, speed)
                if found is None:
                    break
                sequence, allowed = found
            if not allowed:
                break
            asked[sequence.request.account] += 1
            why = model.queue.reason(sequence, now) if sequence is head else BELOW_SHARE
            model.queue.pop(sequence)
            room -= len(sequence.token_ids)
            reservations.append(_ask(state, model, sequence, allowed, why))
    return reservations


def _prompt_room(state: State, model: Model, executors: list[Executor]) -> int:
    """Tokens of prompts that may be placed now, beside those that were asked for."""
    return sum(max(0, queue_room(state, executor)) for executor in executors) - asked_tokens(state, model)


def _candidates(serving: list[Executor]) -> list[Executor]:
    """Executors that take newcomers: none whose own sequences lack blocks, and all with the same weights."""
    open_ones = sorted([e for e in serving if e.takes and not e.starved], key=lambda e: len(e.running))
    return [e for e in open_ones if e.fingerprint == open_ones[0].fingerprint]


def _fits(state: State, sequence: Sequence, executor: Executor) -> bool:
    """Whether a preempted sequence may come back: not before every one that grows there could by a block as well."""
    growing = sum(not other.request.held for other in executor.running.values())
    if not growing or executor.available_blocks is None:
        return True
    wanted = executor.blocks_of(len(sequence.token_ids) + state.limits.lookahead_tokens)
    return wanted + growing <= executor.available_blocks


def _ask_forks(state: State) -> list[Ask]:
    """Reservations of what continues running sequences, before whoever waits."""
    forks, state.forks = state.forks, []
    asks = []
    for sequence in forks:
        if sequence.phase is Phase.WAITING and sequence.origin is not None:  # else it ended meanwhile
            model, allowed = state.models[sequence.request.model], [sequence.origin.executor]
            asks.append(_ask(state, model, sequence, allowed, "continues another"))
            state.asked[sequence.sequence_id].is_fork = True
    return asks


def _ask(state: State, model: Model, sequence: Sequence, allowed: list[Executor], why: str) -> Ask:
    request = sequence.request
    origin, sequence.origin = sequence.origin, None
    shared = origin.length if origin is not None and origin.executor in allowed else 0
    sequence.move(Phase.RESERVING)
    sequence.sequence_id = next(state.sequence_ids)
    request.account.ask(sequence)
    executors = {e.executor_id: (e, e.epoch) for e in allowed}
    state.asked[sequence.sequence_id] = Asked(sequence, model, executors, why)
    model.asked_count += 1
    length = len(sequence.token_ids)
    lookahead = min(state.limits.lookahead_tokens, sequence.length_limit - length)
    for executor in allowed:
        executor.asked_count += 1
        if executor.available_blocks is not None:
            executor.available_blocks -= executor.blocks_of(length + lookahead) - shared // executor.block_size
    reservation = kvmanager_pb2.Reservation(
        sequence_id=sequence.sequence_id,
        model_fingerprint=allowed[0].fingerprint,
        namespace=request.tenant,
        token_ids=sequence.token_ids,
        lookahead_tokens=max(0, lookahead),
        kv_policy=allowed[0].description.kv_policy if allowed[0].description is not None else "",
        skip_prefix_cache=sequence.computes_whole_prompt,
        parent_sequence_id=origin.sequence_id if origin is not None and shared else 0,
        parent_length=shared,
        most_tokens=request.most_tokens,
        expected_output_tokens=max(1, sequence.expected_output - sequence.output_length),
    )
    return reservation, allowed


def report(state: State, executor: Executor, sequence: Sequence) -> None:
    """Notes for the kvmanager that further blocks are full."""
    news = sequence.token_ids[sequence.reported_length :]
    state.progress.append((sequence.sequence_id, sequence.computed_length, news))
    sequence.note_reported(executor.block_size)
    if sequence.output_length >= sequence.expected_output:
        expect(state, sequence)


def take(state: State, response: kvmanager_pb2.ReserveResponse, now: float) -> None:
    """Takes one message of the kvmanager."""
    if response.space or response.reservations or response.extensions:
        state.may_admit = True
    executors = {e.executor_id: e for e in state.executors if e.description is not None}
    for space in response.space:
        if (executor := executors.get(space.executor_id)) is not None:
            before, executor.available_blocks = executor.available_blocks, space.available_block_count
            executor.total_blocks = space.total_block_count
            if space.coming_block_count != executor.coming_blocks:
                executor.coming_blocks, executor.coming_at = space.coming_block_count, now
            state.touched[executor] = None
            if before is None or space.available_block_count > before:
                _space_appeared(state, [executor])
    for result in response.reservations:
        _take_reservation(state, result, now)
    if response.lost_sequence_ids:
        lose(state, list(response.lost_sequence_ids))
    for extension in response.extensions:
        _take_extension(state, extension)
    for sealed in response.sealed:
        if (executor := executors.get(sealed.executor_id)) is not None:
            executor.sealed.extend(sealed.blocks)
    for operations in response.operations:
        executor = executors.get(operations.executor_id)
        if executor is not None and executor.epoch == operations.epoch:
            executor.operations.extend(operations.operations)
            state.touched[executor] = None


def _space_appeared(state: State, executors: list[Executor]) -> None:
    """Who was refused blocks there may ask again: sequences that run, and one newcomer of each model."""
    for executor in executors:
        if executor.starved:
            executor.has_space = True
    for model in state.models.values():
        if model.window == 0 and any(e.model is not None and e.model.name == model.description.name for e in executors):
            model.window = 1


def _take_reservation(state: State, result: kvmanager_pb2.ReservationResult, now: float) -> None:
    asked = state.asked.get(result.sequence_id)
    if asked is None:
        raise QuireError(Reason.PROTOCOL, f"an answer to reservation {result.sequence_id}, which was not asked for")
    if result.outcome == GRANTED and result.executor_id not in asked.executors:
        raise QuireError(Reason.PROTOCOL, f"executor {result.executor_id!r} was not among those allowed")
    del state.asked[result.sequence_id]
    model, sequence = asked.model, asked.sequence
    model.asked_count -= 1
    for executor, _ in asked.executors.values():
        executor.asked_count -= 1
        if not executor.asked_count and _stands_still(executor):
            state.touched[executor] = None  # what rests there may have waited for this answer
    if result.outcome == GRANTED:
        model.window, model.unplaced_since = UNLIMITED, None
        executor, epoch = asked.executors[result.executor_id]
        if sequence is not None and executor.takes and executor.epoch == epoch:
            place(state, sequence, executor, result, now)
            if sequence.beam is None or sequence.output_length == 0:
                _note(model, sequence, executor, asked.why, result, now)
            return
        state.releases.append(result.sequence_id)
        if sequence is not None:
            wait_again(state, sequence)
    elif sequence is not None:
        _refused(state, asked, sequence, result, now)


def _stands_still(executor: Executor) -> bool:
    """Whether it may be that nothing advances there. Where it is not, results will come."""
    first = next(iter(executor.running.values()), None)
    return first is not None and (first.rests or first.request.held)


def _note(
    model: Model, sequence: Sequence, executor: Executor, why: str, result: kvmanager_pb2.ReservationResult, now: float
) -> None:
    request, placement = sequence.request, tuple(result.reasons)
    who = (request.request_id, sequence.choice, request.tenant)
    model.admissions.append(Admission(now, *who, now - request.arrived_at, executor.target, why, placement))


def _refused(
    state: State, asked: Asked, sequence: Sequence, result: kvmanager_pb2.ReservationResult, now: float
) -> None:
    model, reasons = asked.model, "; ".join(result.reasons)
    wait_again(state, sequence)
    if asked.is_fork and result.outcome in (NO_BLOCKS, NO_EXECUTOR):
        return  # it was asked for at one place: now it waits for any, and nobody else has to
    if result.outcome == NO_BLOCKS:
        model.refusal = f"no KV blocks: {reasons}" if reasons else "no KV blocks"
        model.window, model.unplaced_since = 0, None
        serving = state.serving(sequence.request.model)
        if not any(e.running or e.leaving for e in serving) and not state.releases:
            model.retry_at = now + QUIET_RETRY_SECONDS
    elif result.outcome == NO_EXECUTOR:
        model.refusal = f"the kvmanager knows no executor: {reasons}"
        model.window = 0
        model.unplaced_since = model.unplaced_since if model.unplaced_since is not None else now
        waited = now - model.unplaced_since
        model.retry_at = now + min(QUIET_RETRY_SECONDS, max(UNREGISTERED_RETRY_SECONDS, waited))
    elif result.outcome == NEVER_FITS:
        message = (
            f"prompt and max_tokens, {sequence.request.most_tokens + 1} tokens, need more KV blocks than there are"
        )
        message += f": {reasons}" if reasons else ""
        fail_request(state, sequence.request, QuireError(Reason.NEVER_FITS, message))
    else:
        fail_request(state, sequence.request, QuireError(Reason.INTERNAL, f"the kvmanager refused: {reasons}"))


def _take_extension(state: State, result: kvmanager_pb2.ExtendResult) -> None:
    stay = result.sequence_id
    sequence = state.running.get(stay)
    if sequence is None or (executor := sequence.executor) is None:
        return  # it ended meanwhile; its release covers these blocks
    state.touched[executor] = None
    if result.outcome == GRANTED:
        sequence.slots_held += count_slots(result.blocks, executor)
        sequence.slots_asked = sequence.slots_held
        assert sequence.stay is not None
        sequence.stay.add(result.blocks, result.demotions)
        if stay not in executor.entering:  # else it enters with all that was granted
            executor.appends.setdefault(stay, []).extend(result.blocks)
            executor.demotions += result.demotions
        if sequence.granted_steps <= executor.grant_steps:
            executor.top_up_due = True
    elif result.outcome == NO_BLOCKS:
        executor.starved[stay] = sequence  # still asking: slots_asked stays above slots_held
    elif result.outcome == NEVER_FITS:
        more = sequence.slots_asked - sequence.slots_held
        if more <= executor.block_size:
            _fail(
                state, sequence, Reason.NEVER_FITS, f"{sequence.slots_asked} tokens take more KV blocks than there are"
            )
            return
        sequence.slots_asked -= more // 2  # a pool that is small for its sequences gives less at a time
        state.extends.append(sequence)
    else:
        _fail(state, sequence, Reason.INTERNAL, f"the kvmanager refused to extend sequence {stay}")


def _fail(state: State, sequence: Sequence, reason: Reason, message: str) -> None:
    finish(state, sequence, types_pb2.FINISH_REASON_ERROR, error=QuireError(reason, message).to_detail())
