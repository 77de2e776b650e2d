"""What an executor computes next: entries, blocks and credit, as one plan. Pure; costs nothing where nothing is due."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

from quire.v1 import executor_pb2, types_pb2
from services.common.constraints.limits import weight
from services.common.limits import MESSAGE_TOKENS
from services.scheduler.lifecycle import UNSENT
from services.scheduler.reserve import want_blocks, want_for_drafts
from services.scheduler.room import CHUNKS_IN_FLIGHT, prefill_room
from services.scheduler.sequence import UNLIMITED_STEPS, Sequence
from services.scheduler.speculation.controller import Grant
from services.scheduler.speculation.credit import fit, grant
from services.scheduler.state import Executor, State
from services.scheduler.stays import Stay

REPORT_GRANTS = 2
"""Tokens wait no longer than about the time of so many grants, however long steps become."""
PREFILL_AHEAD_TOKENS = 256
"""Slots beyond what is granted that a prompt asks for where it did not get all at first."""


def plan(state: State, executor: Executor, budget: int, now: float) -> executor_pb2.StepPlan | None:
    """The executor's next plan, or None where it needs none. Counts it as sent.

    `budget` is the most tokens of a step, decodes and prefill chunks together.
    """
    if not is_due(executor):
        return None
    message = executor_pb2.StepPlan(epoch=executor.epoch, acknowledged_results=executor.acknowledged_results)
    _enter(state, executor, message)
    _grant_chunks(state, executor, message, budget, now)
    if executor.top_up_due:
        _top_up(state, executor, executor.decoding.values(), message, now)
    elif executor.small_top_up_due:
        _top_up(state, executor, executor.capped.values(), message, now)
    executor.top_up_due = executor.small_top_up_due = False
    credit = report_credit(executor)
    moves = executor.operations or executor.copies
    says = message.enter or message.sequence_ids or executor.ended_ids or moves
    if not says and credit == executor.report_credit:
        return None
    executor.step += 1
    message.step = executor.step
    message.report_credit = executor.report_credit = credit
    message.report_seconds = REPORT_GRANTS * state.limits.grant_seconds
    _carry(executor, message)
    return message


def report_credit(executor: Executor) -> int:
    """Credit at which results are due: half of what is granted at most. That of stop strings is short."""
    return 1 if executor.capped else executor.grant_steps


def is_due(executor: Executor) -> bool:
    """Whether a plan would say anything. Whatever makes it so notes the executor as touched."""
    return bool(
        executor.top_up_due
        or executor.small_top_up_due
        or executor.entering
        or executor.ended_ids
        or executor.operations
        or executor.copies
        or (executor.running and report_credit(executor) != executor.report_credit)
    )


def _enter(state: State, executor: Executor, message: executor_pb2.StepPlan) -> None:
    tokens = 0
    for stay, sequence in list(executor.entering.items()):
        tokens += len(sequence.token_ids) + weight(sequence.request.constraint)
        if tokens > MESSAGE_TOKENS and message.enter:
            state.touched[executor] = None  # the others enter with the next plan
            break
        del executor.entering[stay]
        assert sequence.stay is not None
        message.enter.append(_full_state(sequence, sequence.stay))
        message.demotions.extend(sequence.stay.demotions)


def _full_state(sequence: Sequence, stay: Stay) -> executor_pb2.SequenceState:
    request = sequence.request
    logprobs = types_pb2.LogprobOptions()
    logprobs.CopyFrom(request.logprobs)
    if not sequence.wants_prompt_scores:
        logprobs.ClearField("prompt_count")
    return executor_pb2.SequenceState(
        sequence_id=sequence.sequence_id,
        request_id=request.request_id,
        choice=sequence.choice,
        token_ids=sequence.token_ids,
        prompt_length=request.prompt_length,
        computed_length=sequence.computed_length,
        blocks=stay.block_lists(),
        sampling=request.sampling,
        stop=request.stop,
        logprobs=logprobs,
        constraint=request.constraint,
        traceparent=request.traceparent,
        pooling=request.pooling,
    )


def _grant_chunks(state: State, executor: Executor, message: executor_pb2.StepPlan, budget: int, now: float) -> None:
    """Grants prefill chunks, first come first served, so that a step's chunks have room beside its decodes.

    Those whose prompt the first of the steps ahead completes decode in the second.
    """
    if not executor.prefilling:
        return
    state.may_admit = True  # there will be room for another prompt
    _grant_last_tokens(executor, message, now)
    taken = [0] * CHUNKS_IN_FLIGHT  # tokens by position in the sequences' credit
    for sequence in chain(executor.prefilling.values(), executor.chunking.values()):
        for position, chunk in enumerate(sequence.chunks):
            taken[position] += chunk
    for position in range(CHUNKS_IN_FLIGHT):
        left = prefill_room(state, executor, budget) - taken[position]
        for stay, sequence in list(executor.prefilling.items()):
            if left <= 0:
                break
            if len(sequence.chunks) != position or stay in executor.entering or sequence.step_limit == 0:
                continue
            chunk = min(left, _chunk_room(sequence))
            if chunk <= 0:
                continue
            left -= chunk
            _grant_chunk(sequence, message, chunk, now)
            if not sequence.is_prefilling:
                _start_decoding(executor, sequence)
    for stay, sequence in executor.prefilling.items():
        slots = sequence.slots_held
        if slots >= sequence.length_limit or sequence.slots_asked > slots:
            continue
        if stay in executor.entering or sequence.step_limit == 0:
            continue
        if slots < sequence.projected_length + PREFILL_AHEAD_TOKENS:
            want_blocks(state, sequence, PREFILL_AHEAD_TOKENS)


def _grant_last_tokens(executor: Executor, message: executor_pb2.StepPlan, now: float) -> None:
    """Grants what lacks one token, as forks do: that is a decode, which does not wait behind the prompts of others."""
    for stay, sequence in list(executor.prefilling.items()):
        if len(sequence.token_ids) != sequence.projected_length + 1 or sequence.chunks or stay in executor.entering:
            continue
        if sequence.step_limit and _chunk_room(sequence):
            _grant_chunk(sequence, message, 1, now)
            _start_decoding(executor, sequence)


def _chunk_room(sequence: Sequence) -> int:
    """The most tokens of the next chunk: what is known and has slots, up to the next change of the block table."""
    assert sequence.stay is not None
    projected = sequence.projected_length
    room = min(len(sequence.token_ids), sequence.slots_held) - projected
    until_change = sequence.stay.room(projected)
    return room if until_change is None else min(room, until_change)


def _start_decoding(executor: Executor, sequence: Sequence) -> None:
    stay = sequence.sequence_id
    del executor.prefilling[stay]
    executor.decoding[stay] = executor.chunking[stay] = sequence
    if sequence.step_limit == UNLIMITED_STEPS:
        executor.top_up_due = True
    else:
        executor.capped[stay] = sequence
        executor.small_top_up_due = True


def _top_up(
    state: State, executor: Executor, sequences: Collection[Sequence], message: executor_pb2.StepPlan, now: float
) -> None:
    """Tops decoding sequences up to twice what is granted at a time, within their blocks and budgets."""
    ids, counts, drafts, credits = [], [], [], []
    lookahead, target = state.limits.lookahead_tokens, 2 * executor.grant_steps
    spare = executor.grant_steps  # slots of the next top-up, which no credit of drafts takes
    extra = _drafts(executor, sequences, target, now)
    for sequence in sequences:
        granted, projected = sequence.granted_steps, sequence.projected_length
        slots, limit = sequence.slots_held, sequence.length_limit
        steps = (target if target < sequence.step_limit else sequence.step_limit) - granted
        draft = wanted = extra.drafts(sequence.habit) if extra is not None else 0
        if draft or sequence.draft_limits:
            if extra is not None and sequence.habit is extra.probed:
                steps = min(steps, extra.probe_steps)
            steps, draft = fit(sequence, steps, draft, spare)
        else:
            end = slots if slots < limit else limit
            if steps > end - projected:
                steps = end - projected
        if steps > 0:
            ids.append(sequence.sequence_id)
            counts.append(steps)
            drafts.append(draft)
            if granted == 0:
                sequence.answered_at = now
            if draft or sequence.draft_limits:
                credits.append(grant(sequence, steps, draft, spare))
            else:
                credits.append(0)
                sequence.granted_steps = granted + steps
                sequence.projected_length = projected = projected + steps
        if wanted or sequence.draft_limits:
            want_for_drafts(state, executor, sequence)
        elif slots - projected < lookahead and slots < limit and sequence.slots_asked == slots:
            want_blocks(state, sequence, lookahead)
    message.sequence_ids.extend(ids)
    message.token_limits.extend([1] * len(ids))
    message.draft_limits.extend(drafts)
    message.draft_credits.extend(credits)
    message.step_counts.extend(counts)


def _drafts(executor: Executor, sequences: Collection[Sequence], target: int, now: float) -> Grant | None:
    """Drafts of those that decode and get steps up to `target`; none while blocks are short, for they take blocks ahead
    of need."""
    known = executor.speculation
    if known is None or executor.starved:
        return None
    habits = [sequence.habit for sequence in sequences]
    if len(sequences) < len(executor.decoding):
        return known.steady(habits)
    steps = [max(0, min(target, sequence.step_limit) - sequence.granted_steps) for sequence in sequences]
    return known.grant(habits, steps, now)


def _grant_chunk(sequence: Sequence, message: executor_pb2.StepPlan, tokens: int, now: float) -> None:
    message.sequence_ids.append(sequence.sequence_id)
    message.token_limits.append(tokens)
    message.draft_limits.append(0)
    message.draft_credits.append(0)
    message.step_counts.append(1)
    if sequence.granted_steps == 0:
        sequence.answered_at = now
    sequence.granted_steps += 1
    sequence.chunks.append(tokens)
    if sequence.draft_limits:
        sequence.draft_limits.append(0)
    sequence.projected_length += tokens


def _carry(executor: Executor, message: executor_pb2.StepPlan) -> None:
    """Moves what waited for a plan into this one."""
    message.ended_sequence_ids.extend(executor.ended_ids)
    for stay in executor.ended_ids:
        if executor.leaving[stay].plan == UNSENT:
            executor.leaving[stay].plan = executor.step
    for stay, blocks in executor.appends.items():
        append = message.append.add()
        append.sequence_id = stay
        append.blocks.extend(blocks)
    message.sealed.extend(executor.sealed)
    message.operations.extend(executor.copies)
    message.operations.extend(executor.operations)
    message.demotions.extend(executor.demotions)
    executor.ended_ids, executor.sealed, executor.operations, executor.demotions = [], [], [], []
    executor.copies, executor.appends = [], {}
