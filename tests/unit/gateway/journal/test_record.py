"""A request from what was written of it, whatever was written when, and whatever got lost."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.v1 import journal_pb2, scheduler_pb2, types_pb2
from services.gateway.journal.record import Written, next_piece, record_is_whole, replay
from services.gateway.requests import OpenRequest, Score

STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH


def make(submit: scheduler_pb2.Submit) -> OpenRequest:
    return OpenRequest(submit, types_pb2.ModelDescription(name="m"), frozenset(), 0.0, None, lambda c, n, now: None)


def submit(choices: int = 1, **logprobs: Any) -> scheduler_pb2.Submit:
    one = scheduler_pb2.Submit(
        request_id="r", tenant="t", model="m", prompt_token_ids=[1, 2, 3], choice_count=choices, keep_ms=1000
    )
    one.stop.max_tokens = 1000
    one.logprobs.CopyFrom(types_pb2.LogprobOptions(**logprobs))
    return one


def again(head: journal_pb2.JournalHead, pieces: list[journal_pb2.JournalPiece]) -> tuple[OpenRequest, Written]:
    sent = [journal_pb2.JournalPiece.FromString(piece.SerializeToString()) for piece in pieces]
    return replay(head, sent, make)


def state(request: OpenRequest) -> Any:
    choices = [(c.output, c.scores, c.end, c.stop_token_id, c.cumulative_logprob) for c in request.choices]
    return choices, request.prompt_scores, request.started is not None, request.may_run_at


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_events_and_writes(seed: int) -> None:
    rng = random.Random(seed)
    scores = {"output_count": 1, "prompt_count": 0} if seed % 2 else {}
    one = submit(3, **scores)
    request, written = make(one), Written()
    head, pieces = journal_pb2.JournalHead(submit=one), []
    request.may_run_at = "s"
    for _ in range(60):
        choice = rng.randrange(3)
        open_choice = request.choices[choice]
        ids = [rng.randrange(100) for _ in range(rng.randrange(4))]
        kept = [Score(-float(one), 1, ((one, -0.5),)) for one in ids] if scores else []
        if request.started is None:
            request.start(scheduler_pb2.RequestStarted(handle=1, cached_tokens=2))
            if scores:
                request.accept_prompt_scores(1, [Score(-1.0, 1, ()), Score(-2.0, 2, ())])
        elif open_choice.end is None:
            request.accept_tokens(choice, len(open_choice.output), ids, kept, 0.0)
            what = rng.random()
            if what < 0.04 and len(open_choice.output) > 2:
                open_choice.cut(len(open_choice.output) - 2)  # some of it may be written already
            elif what < 0.08:
                request.accept_end(scheduler_pb2.ChoiceEnd(choice=choice, reason=STOP, stop_token_id=0))
        if rng.random() < 0.5 and (piece := next_piece(request, written)) is not None:
            pieces.append(piece)
            found, known = again(head, pieces)
            assert state(found) == state(request)
            assert known == written
            assert record_is_whole(head, pieces) == request.complete
            assert next_piece(found, known) is None
    if (piece := next_piece(request, written)) is not None:
        pieces.append(piece)
    assert state(again(head, pieces)[0]) == state(request)
    doubled = [piece for piece in pieces for _ in range(2)]  # a write whose answer was lost
    assert state(again(head, doubled)[0]) == state(request)


def test_behind_a_gap_nothing_counts() -> None:
    one = submit()
    request, written = make(one), Written()
    request.start(scheduler_pb2.RequestStarted())
    pieces = []
    for token in range(6):
        request.accept_tokens(0, token, [token], [], 0.0)
        piece = next_piece(request, written)
        assert piece is not None
        pieces.append(piece)
    del pieces[3]
    found, known = again(journal_pb2.JournalHead(submit=one), pieces)
    assert found.choices[0].output == [0, 1, 2]
    piece = next_piece(request, known)
    assert piece is not None
    assert (piece.choices[0].position, list(piece.choices[0].token_ids)) == (3, [3, 4, 5])


def test_an_end_without_tokens() -> None:
    one = submit()
    request, written = make(one), Written()
    request.start(scheduler_pb2.RequestStarted())
    request.accept_tokens(0, 0, [5], [], 0.0)
    head, pieces = journal_pb2.JournalHead(submit=one), [next_piece(request, written)]
    request.accept_end(scheduler_pb2.ChoiceEnd(reason=LENGTH))
    pieces.append(next_piece(request, written))
    found, _ = again(head, [piece for piece in pieces if piece is not None])
    assert (found.choices[0].output, found.choices[0].end, found.choices[0].stop_token_id) == ([5], LENGTH, None)
    assert found.complete
