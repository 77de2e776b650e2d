"""Positions, ends, and what goes to a scheduler again."""

from __future__ import annotations

from typing import Any

import pytest

from quire.v1 import scheduler_pb2, types_pb2
from services.common.errors import QuireError, Reason
from services.common.limits import MESSAGE_TOKENS
from services.gateway.dispatch import unpack
from services.gateway.outbox import Outbox
from services.gateway.requests import OpenRequest, RequestTable, Score

EOS = 9
SCORE = Score(-1.0, 1, ())


def request(count: int = 1, deadline_at: float | None = None, **fields: Any) -> OpenRequest:
    submit = scheduler_pb2.Submit(handle=1, request_id="r", prompt_token_ids=[1, 2, 3], choice_count=count, **fields)
    submit.stop.max_tokens = 5
    model = types_pb2.ModelDescription(name="m")
    return OpenRequest(submit, model, frozenset({EOS}), 0.0, deadline_at, lambda choice, tokens, now: None)


def started(count: int = 1, **fields: Any) -> OpenRequest:
    one = request(count, **fields)
    one.start(scheduler_pb2.RequestStarted(handle=1))
    return one


def end(choice: int, reason: types_pb2.FinishReason.ValueType, **fields: Any) -> scheduler_pb2.ChoiceEnd:
    return scheduler_pb2.ChoiceEnd(handle=1, choice=choice, reason=reason, **fields)


def test_positions() -> None:
    one = started()
    one.accept_tokens(0, 0, [10, 11], [], 0)
    one.accept_tokens(0, 0, [10], [], 0)
    one.accept_tokens(0, 1, [11, 12, 13], [], 0)
    assert one.choices[0].output == [10, 11, 12, 13]
    assert one.unread == 4
    with pytest.raises(QuireError, match="position 4 is missing") as caught:
        one.accept_tokens(0, 5, [15], [], 0)
    assert caught.value.reason is Reason.PROTOCOL


def test_tokens_behind_a_cut_are_dropped() -> None:
    one = started(2)
    one.accept_tokens(0, 0, [10, 11, 12], [], 0)
    one.choices[0].cut(1)  # the stop string ended with the first token
    one.accept_tokens(0, 3, [13], [], 0)
    one.accept_tokens(0, 4, [14, 15], [], 0)
    assert one.choices[0].output == [10]
    assert one.error is None
    assert not one.complete, "the other choice goes on"


def test_scores_are_cut_like_the_tokens() -> None:
    one = started(logprobs=types_pb2.LogprobOptions(output_count=0))
    one.accept_tokens(0, 0, [10], [SCORE], 0)
    one.accept_tokens(0, 0, [10, 11], [SCORE, Score(-2.0, 2, ())], 0)
    assert one.choices[0].since(0) == ([10, 11], [SCORE, Score(-2.0, 2, ())])
    with pytest.raises(QuireError, match="0 log probabilities"):
        one.accept_tokens(0, 2, [12], [], 0)


def test_prompt_scores_have_positions_too() -> None:
    one = started(logprobs=types_pb2.LogprobOptions(prompt_count=0))
    with pytest.raises(QuireError, match="tokens came before"):
        one.accept_tokens(0, 0, [10], [], 0)
    with pytest.raises(QuireError, match="prompt token 1"):
        one.accept_prompt_scores(2, [SCORE])
    one.accept_prompt_scores(1, [SCORE])
    one.accept_prompt_scores(1, [SCORE, SCORE])
    assert one.prompt_scored
    assert len(one.prompt_scores) == 2


def test_tokens_need_a_start_and_a_known_choice() -> None:
    with pytest.raises(QuireError, match="tokens came before"):
        request().accept_tokens(0, 0, [1], [], 0)
    with pytest.raises(QuireError, match="choice 1"):
        started().accept_tokens(1, 0, [1], [], 0)


def test_ends() -> None:
    one = started(2)
    one.accept_end(end(1, types_pb2.FINISH_REASON_STOP, stop_token_id=0))
    assert (one.choices[1].end, one.choices[1].stop_token_id) == (types_pb2.FINISH_REASON_STOP, 0)
    one.accept_tokens(1, 0, [5], [], 0)
    assert one.choices[1].output == []  # ended
    assert not one.complete
    detail = QuireError(Reason.QUEUE_FULL, "full").to_detail()
    one.accept_end(end(0, types_pb2.FINISH_REASON_ERROR, error=detail))
    assert one.complete
    assert one.error is not None
    assert one.error.reason is Reason.QUEUE_FULL
    one.fail(QuireError(Reason.INTERNAL, "later"))
    assert one.error.reason is Reason.QUEUE_FULL


def test_what_ends_behind_a_failure_is_not_taken_for_whole() -> None:
    """Its last token and its end arrive in one message, just after the deadline, before a slow reader looks."""
    one = started()
    one.accept_tokens(0, 0, [1, 2], [], 0.0)
    one.fail(QuireError(Reason.DEADLINE, "the deadline passed"))
    one.accept_tokens(0, 2, [3], [], 0.0)
    one.accept_end(end(0, types_pb2.FINISH_REASON_LENGTH))
    (choice,) = one.choices
    assert (choice.output, choice.end) == ([1, 2], None)
    assert one.error is not None
    assert one.error.reason is Reason.DEADLINE


def test_no_end_is_silent() -> None:
    """A7: an end without a reason, or for a choice that is not there, is an error."""
    for ended in (end(0, types_pb2.FINISH_REASON_UNSPECIFIED), end(4, types_pb2.FINISH_REASON_STOP)):
        one = started()
        one.accept_end(ended)
        assert one.error is not None
    one = started()
    one.accept_end(end(0, types_pb2.FINISH_REASON_CANCELLED))
    assert one.error is not None
    assert one.error.reason is Reason.CANCELLED


def test_submitted_again_with_what_is_there() -> None:
    one = started(2, deadline_at=10.0, logprobs=types_pb2.LogprobOptions(prompt_count=0, output_count=0))
    assert not one.to_submit(4.0).progress
    one.accept_prompt_scores(1, [SCORE, SCORE])
    one.accept_tokens(0, 0, [4, 5], [SCORE, SCORE], 0)
    one.choices[0].cut(1)
    submit = one.to_submit(9.75)
    assert submit.deadline_ms == 250
    assert [(p.choice, list(p.token_ids), p.ended) for p in submit.progress] == [(0, [4], True), (1, [], False)]
    assert submit.logprobs.HasField("output_count")
    assert not submit.logprobs.HasField("prompt_count")  # the client has those already
    assert one.to_submit(99.0).deadline_ms == 1  # 0 would mean none


def test_a_target_for_the_first_token_shrinks_with_waiting_and_is_gone_once_it_came() -> None:
    one = started(target_first_token_ms=400, target_token_gap_ms=30)
    assert one.to_submit(0.1).target_first_token_ms == 300
    assert one.to_submit(99.0).target_first_token_ms == 1  # 0 would mean none
    one.accept_tokens(0, 0, [4], [], 0)
    again = one.to_submit(0.2)
    assert (again.target_first_token_ms, again.target_token_gap_ms) == (0, 30)
    assert started().to_submit(99.0).target_first_token_ms == 0


def test_settle_knows_ends_from_tokens() -> None:
    one = started(4)
    one.accept_tokens(0, 0, [4, EOS], [], 0)
    one.accept_tokens(1, 0, [4] * 5, [], 0)
    one.accept_tokens(2, 0, [4] * 4, [], 0)
    one.settle()
    assert [choice.end for choice in one.choices] == [
        types_pb2.FINISH_REASON_STOP,
        types_pb2.FINISH_REASON_LENGTH,
        None,
        None,
    ]
    assert one.choices[0].stop_token_id == EOS


async def test_table_refuses_running_ids() -> None:
    table = RequestTable()
    first = table.claim("t", "a")
    with pytest.raises(QuireError) as caught:
        table.claim("t", "a")
    assert caught.value.reason is Reason.ALREADY_EXISTS
    assert table.claim("t", "b") != first
    assert table.claim("u", "a") != first  # of another tenant
    for tenant, request_id in (("t", "a"), ("t", "b"), ("u", "a")):
        assert len(table) > 0
        table.release(tenant, request_id)
    await table.empty()
    assert table.claim("t", "a") > first


def test_outbox_coalesces_and_keeps_order() -> None:
    outbox = Outbox()
    assert not outbox
    outbox.submit(request())
    outbox.hold(7, True)
    outbox.hold(7, False)
    outbox.stop_at(7, 1, 3)
    outbox.cancel(8)
    message = outbox.take(0)
    assert not outbox
    assert (len(message.submits), len(message.stops), len(message.holds), len(message.cancels)) == (1, 1, 1, 1)
    assert message.holds[0].held is False
    outbox.submit(request())
    outbox.cancel(1)
    assert not outbox  # never sent, so nothing to cancel


def test_outbox_bounds_messages() -> None:
    """L1: what is larger goes in several messages; what speaks of a request follows it."""
    outbox = Outbox()
    for handle in (1, 2, 3):
        one = request()
        one.handle = handle
        one.template.prompt_token_ids.extend([1] * MESSAGE_TOKENS)
        outbox.submit(one)
    outbox.stop_at(3, 0, 1)
    messages = [outbox.take(0) for _ in range(3)]
    assert [len(message.submits) for message in messages] == [1, 1, 1]
    assert [len(message.stops) for message in messages] == [0, 0, 1]
    assert not outbox


def test_unpack_scores() -> None:
    packed = types_pb2.TokenLogprobs(
        chosen=[-1, -2], ranks=[1, 3], top_count=2, top_token_ids=[1, 2, 3, 4], top_logprobs=[-1, -1.5, -0.5, -1]
    )
    assert unpack(packed) == [Score(-1, 1, ((1, -1), (2, -1.5))), Score(-2, 3, ((3, -0.5), (4, -1)))]
    packed.top_token_ids.append(5)
    with pytest.raises(QuireError):
        unpack(packed)
