"""A request as its journal tells it: what was not written yet, and the request again from what was. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from quire.v1 import journal_pb2, scheduler_pb2, types_pb2
from services.gateway.dispatch import unpack
from services.gateway.requests import OpenChoice, OpenRequest, Score


@dataclass(slots=True)
class Written:
    """How much of a request its journal has."""

    scheduler: str = ""
    started: bool = False
    prompt: int = 0  # scores of the prompt
    tokens: dict[int, int] = field(default_factory=dict)  # by choice
    ended: set[int] = field(default_factory=set)  # choices


def next_piece(request: OpenRequest, written: Written) -> journal_pb2.JournalPiece | None:
    """What the journal lacks, which `written` then has; None where that is nothing."""
    piece = journal_pb2.JournalPiece()
    changed = False
    if request.may_run_at and request.may_run_at != written.scheduler:
        piece.scheduler = written.scheduler = request.may_run_at
        changed = True
    if request.started is not None and not written.started:
        piece.started.CopyFrom(request.started)
        piece.started.handle, piece.started.model = 0, request.model.name
        written.started = changed = True
    if scores := request.prompt_scores[written.prompt :]:
        piece.prompt.CopyFrom(pack(scores))
        piece.prompt_start = written.prompt + 1
        written.prompt += len(scores)
        changed = True
    for choice in request.choices:
        if (entry := _next_of(choice, written, request.wants_scores)) is not None:
            piece.choices.append(entry)
            changed = True
    return piece if changed else None


def _next_of(choice: OpenChoice, written: Written, wants_scores: bool) -> journal_pb2.JournalChoice | None:
    ends = choice.end is not None and choice.index not in written.ended
    position = min(written.tokens.get(choice.index, 0), len(choice.output))  # a stop string may have cut behind it
    if choice.index in written.ended or not (ends or len(choice.output) > position):
        return None
    ids, scores = choice.since(position)
    entry = journal_pb2.JournalChoice(choice=choice.index, position=position, token_ids=ids)
    if wants_scores and scores:
        entry.logprobs.CopyFrom(pack(scores))
    written.tokens[choice.index] = position + len(ids)
    if ends:
        written.ended.add(choice.index)
        entry.end.CopyFrom(
            scheduler_pb2.ChoiceEnd(
                choice=choice.index,
                reason=choice.end or types_pb2.FINISH_REASON_UNSPECIFIED,
                stop_token_id=choice.stop_token_id,
                cumulative_logprob=choice.cumulative_logprob,
            )
        )
    return entry


def replay(
    head: journal_pb2.JournalHead,
    pieces: Iterable[journal_pb2.JournalPiece],
    make: Callable[[scheduler_pb2.Submit], OpenRequest],
) -> tuple[OpenRequest, Written]:
    """The request as far as its journal goes; `make` makes one that has not begun.

    Behind a gap, which a lost store leaves, nothing counts: it is computed again.
    """
    request, written = make(head.submit), Written()
    for piece in pieces:
        if piece.scheduler:
            request.may_run_at = written.scheduler = piece.scheduler
        if piece.HasField("started"):
            request.started = piece.started
            written.started = True
        if piece.prompt.chosen and piece.prompt_start <= len(request.prompt_scores) + 1:
            request.accept_prompt_scores(piece.prompt_start, unpack(piece.prompt))
            written.prompt = len(request.prompt_scores)
        for entry in piece.choices:
            if 0 <= entry.choice < len(request.choices):
                _take(request.choices[entry.choice], entry, written, request.wants_scores)
    return request, written


def record_is_whole(head: journal_pb2.JournalHead, pieces: Iterable[journal_pb2.JournalPiece]) -> bool:
    """Whether the request has ended."""
    ended = {entry.choice for piece in pieces for entry in piece.choices if entry.HasField("end")}
    return len(ended) == head.submit.choice_count


def _take(choice: OpenChoice, entry: journal_pb2.JournalChoice, written: Written, wants_scores: bool) -> None:
    if choice.end is not None:
        return
    scores = unpack(entry.logprobs)
    if entry.position > len(choice.output) or (wants_scores and len(scores) != len(entry.token_ids)):
        return
    if entry.HasField("end"):
        del choice.output[entry.position :], choice.scores[entry.position :]
    choice.accept(entry.position, entry.token_ids, scores)
    written.tokens[choice.index] = len(choice.output)
    if entry.HasField("end"):
        end = entry.end
        choice.end = end.reason
        choice.stop_token_id = end.stop_token_id if end.HasField("stop_token_id") else None
        choice.cumulative_logprob = end.cumulative_logprob if end.HasField("cumulative_logprob") else None
        written.ended.add(choice.index)


def pack(scores: Sequence[Score]) -> types_pb2.TokenLogprobs:
    """Scores of consecutive tokens, all with as many alternatives, as they travel."""
    packed = types_pb2.TokenLogprobs(top_count=len(scores[0].top))
    for score in scores:
        packed.chosen.append(score.logprob)
        packed.ranks.append(score.rank)
        for token, logprob in score.top:
            packed.top_token_ids.append(token)
            packed.top_logprobs.append(logprob)
    return packed
