"""Beam search: what becomes of the sequences of a search, which are its paths. Which paths go on is beam_search.py's.

A path computes its last token and rests: its executor says which tokens may come next, and draws the likeliest of
those that end nothing. Once all paths of a search rest, the search takes a step. A path that goes on with the token
drawn stays where it is; all others are forks. Nothing is planned beyond that: there is no run-ahead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from quire.v1 import executor_pb2, scheduler_pb2, types_pb2
from services.common.beams import end_tokens
from services.common.errors import QuireError, Reason
from services.scheduler.beam_search import EMPTY, Option, Path, Rule, Search
from services.scheduler.forks import fork, origin_of
from services.scheduler.lifecycle import (
    end_choice,
    enqueue,
    forget_request,
    leave,
    let_paths_go_on,
    requeue,
    retire,
)
from services.scheduler.reserve import report
from services.scheduler.sequence import Phase, Request, Sequence
from services.scheduler.state import Executor, State
from services.scheduler.stays import Origin

STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH


@dataclass(slots=True)
class Beam:
    """A sequence's part in its search."""

    path: Path
    drawn: int = -1  # the token that the executor goes on with
    options: list[Option] | None = None  # what may come next; None until it is computed


@dataclass(slots=True)
class Beams:
    """The search of one request, and what its client wants to see of it."""

    search: Search
    choice_count: int
    alternatives: int | None  # per token, with log probabilities; None for neither
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))  # tell its sequences apart


def begin(submit: scheduler_pb2.Submit, model: types_pb2.ModelDescription) -> tuple[scheduler_pb2.Submit, Beams]:
    """The request as its sequences are asked, and its search: greedy, without ends, with what may come next."""
    stop, logprobs = submit.stop, submit.logprobs
    ends = end_tokens(stop, model)
    penalty = submit.length_penalty if submit.HasField("length_penalty") else 1.0
    rule = Rule(submit.beam_width, penalty, ends, stop.min_tokens, stop.max_tokens)
    alternatives = logprobs.output_count if logprobs.HasField("output_count") else None
    asked = scheduler_pb2.Submit()
    asked.CopyFrom(submit)
    asked.choice_count = 1
    asked.sampling.CopyFrom(types_pb2.SamplingParams(temperature=0.0, seed=submit.sampling.seed))
    asked.stop.CopyFrom(
        types_pb2.StopCriteria(
            max_tokens=stop.max_tokens, min_tokens=stop.max_tokens, stop_token_ids=sorted(ends), ignore_eos=True
        )
    )
    asked.logprobs.CopyFrom(types_pb2.LogprobOptions(output_count=max(rule.option_count, alternatives or 0)))
    return asked, Beams(Search(rule), submit.choice_count, alternatives)


def set_out(request: Request) -> None:
    """Makes the only sequence of a new request the empty path."""
    request.lead.beam = Beam(EMPTY)
    request.lead.length_limit = len(request.lead.token_ids)


def rest(sequence: Sequence, scores: executor_pb2.SequenceLogprobs) -> None:
    """Takes in what may follow a path. Raises PROTOCOL where that is not about one token."""
    output = scores.output
    if sequence.beam is None or len(output.chosen) != 1:
        raise QuireError(Reason.PROTOCOL, f"scores of {len(output.chosen)} tokens after one step of a path")
    sequence.beam.options = list(map(Option, output.top_token_ids, output.top_logprobs))


def advance(state: State, request: Request) -> None:
    """Takes a step of a request's search, if all its paths rest."""
    resting = request.sequences
    if request.beams is None or request.ended or not all(sequence.rests for sequence in resting):
        return
    beams = [sequence.beam for sequence in resting if sequence.beam is not None]
    going = request.beams.search.advance([b.path for b in beams], [b.options or () for b in beams])
    if not going:
        _answer(state, request, request.beams)
        return
    staying: dict[Sequence, Path] = {}
    forks: dict[Sequence, Origin | None] = {}
    request.sequences = []
    for index, path in going:
        parent = resting[index]
        if path.token_id == beams[index].drawn:
            staying[parent] = path
            request.sequences.append(parent)
        else:
            child = _child(parent, path, next(request.beams.numbers))
            forks[child] = origin_of(parent)
            request.sequences.append(child)
    state.count_live(request, len(forks))
    for parent, beam in zip(resting, beams, strict=True):
        _append(state, parent, beam.drawn)
        if parent in staying:
            _stay(state, parent, staying[parent])
        else:
            retire(state, parent)
    asked = [fork(state, origin, child) for child, origin in forks.items()]
    if not any(asked):  # else they go on with the first of these
        let_paths_go_on(state, request)


def make_way(state: State, executor: Executor, now: float) -> None:
    """Lets a path that rests give up its blocks where nothing advances that runs, and it waits for one without room.

    What does not rest is held by its client, who may take any time. One at a time: it may be enough. What was computed
    of it counts all the same.
    """
    running = executor.running.values()
    if executor.leaving or executor.asked_count or not state.kv_connected:
        return
    if not all(sequence.rests or _is_paused(sequence) for sequence in running):
        return
    resting = [sequence for sequence in running if sequence.rests and not sequence.request.held]
    requests = {sequence.request.arrival: sequence.request for sequence in resting}.values()
    if any(s.phase is Phase.WAITING and not s.rests for request in requests for s in request.sequences):
        victim = max(resting, key=lambda sequence: (sequence.request.arrival, sequence.choice))
        state.decisions.note(now, "preempted", victim, f"paths beside it have no room on {executor.target}")
        leave(state, victim)
        requeue(state, victim)
        executor.counters.preemptions += 1


def _is_paused(sequence: Sequence) -> bool:
    """Whether it is held and has computed all that it was granted."""
    return sequence.step_limit == 0 and sequence.granted_steps == 0


def _child(parent: Sequence, path: Path, number: int) -> Sequence:
    tokens = [*parent.token_ids, path.token_id]
    return Sequence(
        request=parent.request,
        choice=number,
        token_ids=tokens,
        length_limit=len(tokens),
        step_limit=parent.step_limit,
        wants_prompt_scores=False,
        charged=True,  # as output of its parent
        expected_output=parent.expected_output,
        beam=Beam(path),
    )


def _append(state: State, sequence: Sequence, token_id: int) -> None:
    """Appends the token drawn, also where its path ends here: the kvmanager hears of tokens up to the next one."""
    sequence.token_ids.append(token_id)
    executor = sequence.executor
    if executor is not None:
        executor.expected_tokens -= 1
        if sequence.computed_length >= sequence.next_report_length:
            report(state, executor, sequence)


def _stay(state: State, sequence: Sequence, path: Path) -> None:
    """Goes on with the token drawn: where it is, or from the queue where its blocks are gone."""
    sequence.beam = Beam(path)
    sequence.length_limit = len(sequence.token_ids)
    if sequence.executor is None:
        enqueue(state, sequence)


def _answer(state: State, request: Request, beams: Beams) -> None:
    """Tells the gateway of the best paths, and ends all."""
    gateway, ends = request.gateway, beams.search.rule.end_ids
    for sequence in request.sequences:
        retire(state, sequence)
    for choice, finished in enumerate(beams.search.finished[: beams.choice_count]):
        steps = finished.path.steps()
        gateway.say_tokens(request.handle, choice, 0, [step.token_id for step in steps])
        if beams.alternatives is not None:
            scores = _scores(steps, beams.alternatives)
            gateway.outbox.logprobs.append(
                scheduler_pb2.ChoiceLogprobs(handle=request.handle, choice=choice, output=scores)
            )
        last = finished.path.token_id
        end_choice(
            request,
            choice,
            STOP if last in ends else LENGTH,
            stop_token_id=last if last in ends else None,
            cumulative_logprob=finished.path.total,
        )
    forget_request(state, request)


def _scores(steps: Items[Path], count: int) -> types_pb2.TokenLogprobs:
    """Each token's own log probability and rank, with that many alternatives."""
    count = min(count, *(len(step.options) for step in steps))
    return types_pb2.TokenLogprobs(
        chosen=[step.logprob for step in steps],
        ranks=[1 + sum(option.logprob > step.logprob for option in step.options) for step in steps],
        top_count=count,
        top_token_ids=[option.token_id for step in steps for option in step.options[:count]],
        top_logprobs=[option.logprob for step in steps for option in step.options[:count]],
    )
