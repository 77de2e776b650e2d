"""What an executor's results change: lengths, credit, tokens out, ends, blocks that became free. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf

from quire.v1 import executor_pb2, scheduler_pb2, types_pb2
from services.common.errors import QuireError, Reason
from services.scheduler.beams import advance, rest
from services.scheduler.lifecycle import finish, leave_ended, release_siblings
from services.scheduler.pace import GAIN
from services.scheduler.reserve import report, want_for_drafts
from services.scheduler.sequence import Phase, Request, Sequence
from services.scheduler.slowness import note
from services.scheduler.speculation.controller import Controller, Drafting
from services.scheduler.speculation.credit import answer, fit, learn
from services.scheduler.state import RATE_SECONDS, Executor, Gateway, State

Drafted = SequenceOf[tuple[int, int, bool]]
"""Of steps that admitted drafts: proposed, accepted, and whether none could be proposed yet."""
MIN_GRANT_STEPS, MAX_GRANT_STEPS = 2, 32


def apply(state: State, executor: Executor, results: executor_pb2.StepResults, now: float) -> None:
    """Takes one results message. Raises PLAN_GAP or PROTOCOL where the stream cannot be trusted any more.

    Results of an older epoch are skipped: their sequences run elsewhere by now.
    """
    if results.epoch != executor.epoch:
        return
    if results.sequence_number != executor.acknowledged_results + 1:
        raise QuireError(
            Reason.PLAN_GAP, f"results message {results.sequence_number} after {executor.acknowledged_results}"
        )
    executor.acknowledged_results = results.sequence_number
    state.touched[executor] = None
    note(executor, results, now)
    _apply_tokens(state, executor, results, now)
    searches: dict[int, Request] = {}
    for scores in results.logprobs:
        if (sequence := executor.running.get(scores.sequence_id)) is None:
            continue
        if sequence.beam is None:
            _pass_scores(sequence, scores)
        else:
            rest(sequence, scores)
            searches[sequence.request.arrival] = sequence.request
    for embedding in results.embeddings:
        if (sequence := executor.running.get(embedding.sequence_id)) is not None:
            gateway = sequence.request.gateway
            gateway.outbox.embeddings.add(handle=sequence.request.handle, values=embedding.values)
            gateway.has_output = True
    for ended in results.ended:
        if (sequence := executor.running.get(ended.sequence_id)) is not None:
            _end(state, sequence, ended)
    for request in searches.values():
        advance(state, request)
    _free(state, executor, results.last_plan)
    timings = results.timings
    if timings.step_count > 0:
        measure(state, executor, timings)
        if executor.speculation is not None:
            _measure_drafts(executor, executor.speculation, timings)
    if timings.moved_bytes > 0:
        executor.tier_rate.observe(timings.moved_bytes, timings.move_seconds)


def _apply_tokens(state: State, executor: Executor, results: executor_pb2.StepResults, now: float) -> None:
    """The token path: what it does for each sequence is the scheduler's cost of a step."""
    running, decoding, all_ids = executor.running, executor.decoding, results.token_ids[:]
    low, at, unknown, top_up_due = executor.grant_steps, 0, 0, executor.top_up_due
    gateway: Gateway | None = None
    drafted = _drafted(results) if results.draft_step_counts else {}
    rows = (results.sequence_ids[:], results.token_counts[:], results.computed_lengths[:], results.step_counts[:])
    for stay, count, computed, steps in zip(*rows, strict=True):
        start, at = at, at + count
        sequence = running.get(stay)
        if sequence is None:
            unknown += count
            continue  # cancelled or preempted meanwhile
        granted = sequence.granted_steps - steps
        if granted < 0 or computed > sequence.projected_length:
            raise QuireError(Reason.PROTOCOL, f"executor {executor.target} computed more of {stay} than was granted")
        sequence.granted_steps, sequence.computed_length, sequence.answered_at = granted, computed, now
        if sequence.chunks:
            _answer_chunks(state, executor, sequence, steps)
        if sequence.draft_limits or stay in drafted:
            _answer_drafts(executor, sequence, steps, drafted.get(stay, ()))
            want_for_drafts(state, executor, sequence)
        if count:
            request, tokens, ids = sequence.request, sequence.token_ids, all_ids[start:at]
            request.account.output_tokens += count
            if sequence.beam is None:
                if gateway is not request.gateway:
                    gateway = request.gateway
                    gateway.has_output, outputs = True, gateway.outputs
                outputs.append((request.handle, sequence.choice, len(tokens) - request.prompt_length, ids))
                tokens += ids
            else:
                sequence.beam.drawn = ids[-1]
                executor.expected_tokens += count  # it is taken back once the token is taken over
        if computed >= sequence.next_report_length and (computed < len(sequence.token_ids) or _is_known(sequence)):
            report(state, executor, sequence)
        if granted <= low and not top_up_due and _can_gain(sequence) and stay in decoding:
            if sequence.step_limit > 2 * low:
                top_up_due = True
            elif granted < sequence.step_limit:
                executor.small_top_up_due = True
    if at != len(all_ids):
        raise QuireError(Reason.PROTOCOL, f"executor {executor.target} sent {len(all_ids)} tokens for {at}")
    if top_up_due:
        executor.top_up_due = True
    if total := at - unknown:
        executor.counters.output_tokens += total
        executor.expected_tokens -= total
        marks = executor.output_marks
        marks.append((now, total))
        while now - marks[0][0] > RATE_SECONDS:
            marks.popleft()


def _is_known(sequence: Sequence) -> bool:
    """Whether the kvmanager knows all its tokens: of a path that rests it hears at once, for others may wait for it."""
    return sequence.reported_length == len(sequence.token_ids)


def _can_gain(sequence: Sequence) -> bool:
    """Whether a further step of it would fit into its blocks and its budget."""
    if sequence.draft_limits:
        return fit(sequence, 1, 0)[0] > 0
    return sequence.projected_length < min(sequence.length_limit, sequence.slots_held)


def _answer_chunks(state: State, executor: Executor, sequence: Sequence, steps: int) -> None:
    """Prefill advanced: others may be granted chunks, and behind a computed prompt its siblings may start."""
    del sequence.chunks[:steps]
    if executor.prefilling:
        executor.small_top_up_due = True
    if not sequence.chunks:
        executor.chunking.pop(sequence.sequence_id, None)
    request = sequence.request
    if request.siblings_wait and sequence.computed_length >= request.prompt_length:
        release_siblings(state, request)


def _drafted(results: executor_pb2.StepResults) -> dict[int, Drafted]:
    """What became of each step that admitted drafts, by sequence."""
    proposed, accepted, counts = results.proposed_counts[:], results.accepted_counts[:], results.draft_step_counts[:]
    behind = results.behind[:] or [False] * len(proposed)
    if len(results.sequence_ids) != len(counts) or {len(proposed), len(accepted), len(behind)} != {sum(counts)}:
        raise QuireError(Reason.PROTOCOL, "results: the counts of drafts differ in length")
    told = list(zip(proposed, accepted, behind, strict=True))
    found: dict[int, Drafted] = {}
    at = 0
    for stay, count in zip(results.sequence_ids, counts, strict=True):
        if count:
            found[stay] = told[at : at + count]
            at += count
    return found


def _answer_drafts(executor: Executor, sequence: Sequence, steps: int, drafted: Drafted) -> None:
    """Takes in what became of drafts; the sequence's lengths and chunks are up to date."""
    limits = answer(sequence, steps, sum([accepted for _, accepted, _ in drafted]))
    known, tally = executor.speculation, executor.counters.drafts
    if known is None or not len(limits) == len(drafted):
        raise QuireError(
            Reason.PROTOCOL, f"executor {executor.target} drafted for {sequence.sequence_id} without grant"
        )
    gained = 0
    for limit, (proposed, accepted, is_behind) in zip(limits, drafted, strict=True):
        if not 0 <= accepted <= proposed <= limit:
            raise QuireError(
                Reason.PROTOCOL, f"executor {executor.target} says {accepted} of {proposed} of {limit} drafts"
            )
        tally.add(limit, proposed, accepted)
        gained += accepted
        if known.learns and not is_behind:
            known.acceptance.add(sequence.habit, limit, proposed, accepted)
    if limits:
        learn(sequence, len(limits), gained)
        tally.saved_seconds += known.worth(gained)


def _pass_scores(sequence: Sequence, scores: executor_pb2.SequenceLogprobs) -> None:
    """Hands log probabilities to the gateway; those of prompt tokens once, however often the prompt is computed."""
    message = scheduler_pb2.ChoiceLogprobs(handle=sequence.request.handle, choice=sequence.choice)
    if scores.HasField("output"):
        message.output.CopyFrom(scores.output)
    if scores.HasField("prompt"):
        known = max(0, sequence.prompt_scored - scores.prompt_start)
        if known < len(scores.prompt.chosen):
            message.prompt_start = scores.prompt_start + known
            message.prompt.CopyFrom(_cut(scores.prompt, known))
            sequence.prompt_scored = scores.prompt_start + len(scores.prompt.chosen)
            sequence.wants_prompt_scores = sequence.prompt_scored < sequence.prompt_length
    sequence.request.gateway.outbox.logprobs.append(message)
    sequence.request.gateway.has_output = True


def _cut(scores: types_pb2.TokenLogprobs, first: int) -> types_pb2.TokenLogprobs:
    if first == 0:
        return scores
    top = first * scores.top_count
    return types_pb2.TokenLogprobs(
        chosen=scores.chosen[first:],
        ranks=scores.ranks[first:],
        top_count=scores.top_count,
        top_token_ids=scores.top_token_ids[top:],
        top_logprobs=scores.top_logprobs[top:],
    )


def _end(state: State, sequence: Sequence, ended: executor_pb2.SequenceEnd) -> None:
    leave_ended(state, sequence)
    if sequence.rests and ended.reason != types_pb2.FINISH_REASON_ERROR:
        sequence.move(Phase.WAITING)  # at its budget; the search says what becomes of it
        return
    finish(
        state,
        sequence,
        ended.reason,
        error=ended.error if ended.HasField("error") else None,
        stop_token_id=ended.stop_token_id if ended.HasField("stop_token_id") else None,
    )


def _free(state: State, executor: Executor, last_plan: int) -> None:
    """Releases the blocks of stays whose ending plan was taken in."""
    leaving = executor.leaving
    for stay, left in list(leaving.items()):
        if left.plan > last_plan:
            break  # later plans end later
        del leaving[stay]
        state.releases.append(stay)
        if left.returns:
            state.keeps.append(stay)


def measure(state: State, executor: Executor, timings: executor_pb2.StepTimings) -> None:
    """Follows what steps take, and with it G: the steps granted at a time."""
    sampled = timings.sampled_count
    seconds = timings.compute_seconds + timings.host_seconds
    drafts = timings.draft_count
    prefill = timings.token_count - sampled - drafts
    executor.step_time.observe(timings.step_count, sampled, prefill, seconds, drafts)
    executor.drafts_per_step += GAIN * (drafts / timings.step_count - executor.drafts_per_step)
    executor.step_seconds = executor.step_time.step(max(1, len(executor.decoding)), executor.drafts_per_step)
    executor.grant_steps = grant_steps(state.limits.grant_seconds, executor.step_seconds)


def _measure_drafts(executor: Executor, known: Controller, timings: executor_pb2.StepTimings) -> None:
    """Follows what steps take by their tokens, where nothing but decodes was computed, and what drafts cost."""
    steps, rows, drafts = timings.step_count, timings.sampled_count, timings.draft_count
    if not rows:
        return
    drafting = Drafting(
        timings.draft_step_count, drafts, timings.draft_round_count, timings.draft_seconds, timings.catch_up_seconds
    )
    if timings.token_count == rows + drafts:
        known.observe(steps, rows, drafting, timings.compute_seconds + timings.host_seconds)
    known.batch = max(1.0, rows / steps)
    executor.counters.drafts.saved_seconds -= known.price(drafting)


def grant_steps(grant_seconds: float, step_seconds: float) -> int:
    """G: about `grant_seconds` of steps, at least 2."""
    return max(MIN_GRANT_STEPS, min(MAX_GRANT_STEPS, math.ceil(grant_seconds / step_seconds)))
