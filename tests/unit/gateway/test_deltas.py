"""From tokens to deltas."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quire.v1 import types_pb2
from services.common.errors import QuireError
from services.gateway.deltas import ChoiceText, DeltaMaker, OutputReader, end_ids, scored_prompt
from services.gateway.detokenizer import IncrementalDetokenizer
from services.gateway.output.hermes import HermesParser
from services.gateway.output.parts import CallArguments, CallBegin, Message, PlainParser, Reasoning, Text, fold
from services.gateway.output.thinking import Thinking, ThinkingParser
from services.gateway.positions import Seen
from services.gateway.requests import OpenChoice, Score
from services.gateway.stops import StopMatcher
from services.gateway.tokenizer import ModelTokenizer
from tests.fixtures.vocabularies import EOS, EOS_ID, SPECIALS, START_OF_TURN_ID, byte_level

LENGTH, STOP = types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_STOP
TOKENIZER = ModelTokenizer(byte_level(["to", "ken"]).to_json(), {"eos_token": EOS})


def maker(
    choice: OpenChoice,
    stops: Sequence[str] = (),
    *,
    ends: frozenset[int] = frozenset({EOS_ID}),
    keep_special: bool = False,
    scores: bool = False,
    parser: ThinkingParser | None = None,
) -> DeltaMaker:
    matcher = StopMatcher(stops, () if keep_special else SPECIALS, False) if stops else None
    detokenizer = IncrementalDetokenizer(TOKENIZER, (), not keep_special)
    text = ChoiceText(TOKENIZER, detokenizer, matcher, ends, keep_special)
    return DeltaMaker(TOKENIZER, choice, OutputReader(text, parser), scores)


def test_all_that_is_there_comes_in_one_delta() -> None:
    choice = OpenChoice(3)
    deltas = maker(choice)
    assert deltas.take() is None
    choice.accept(0, [260, 261], [])
    choice.accept(2, [*b"s"], [])
    delta = deltas.take()
    assert delta is not None
    assert (delta.choice, delta.text, delta.token_ids, delta.finish_reason) == (3, "tokens", (260, 261, 115), None)
    assert deltas.take() is None
    choice.end = LENGTH
    delta = deltas.take()
    assert delta is not None
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("", (), LENGTH)
    assert deltas.finished
    assert deltas.take() is None


@pytest.mark.parametrize("keep_special", [False, True])
@pytest.mark.parametrize("stops", [(), ("zzz",)])
def test_end_tokens_are_not_text(keep_special: bool, stops: tuple[str, ...]) -> None:
    """A5: whether special tokens are shown or not, the one that ended the choice is not."""
    choice = OpenChoice(0)
    deltas = maker(choice, stops, keep_special=keep_special)
    choice.accept(0, [*b"Hi.", START_OF_TURN_ID, EOS_ID], [])
    choice.end, choice.stop_token_id = STOP, EOS_ID
    delta = deltas.take()
    assert delta is not None
    assert delta.text == ("Hi.<|im_start|>" if keep_special else "Hi.")
    assert (delta.token_ids[-1], delta.matched_token_id) == (EOS_ID, EOS_ID)


def test_a_stop_string_cuts_tokens_and_scores() -> None:
    choice = OpenChoice(0)
    deltas = maker(choice, ["nst"], scores=True)
    ids = [260, 261, ord("s"), ord("t"), ord("x")]
    choice.accept(0, ids, [Score(-float(n), n, ()) for n in range(5)])
    delta = deltas.take()
    assert delta is not None
    assert (delta.text, delta.token_ids, delta.matched_stop) == ("toke", (260, 261, 115, 116), "nst")
    assert delta.logprobs is not None
    assert [token.rank for token in delta.logprobs] == [0, 1, 2, 3]
    assert (choice.end, choice.output, choice.ended_by_gateway) == (STOP, ids[:4], True)
    assert choice.accept(4, [1], []) == 0  # what comes later is dropped


def test_a_stop_string_wins_over_the_budget() -> None:
    choice = OpenChoice(0)
    deltas = maker(choice, ["ab"])
    choice.accept(0, b"xab", [])
    choice.end = LENGTH
    delta = deltas.take()
    assert delta is not None
    assert (delta.text, delta.finish_reason, choice.ended_by_gateway) == ("x", STOP, False)


def test_bytes_that_stay_incomplete_show_at_the_end() -> None:
    choice = OpenChoice(0)
    deltas = maker(choice)
    choice.accept(0, [*b"ok", 0xF0, 0x9F], [])
    first = deltas.take()
    choice.end = LENGTH
    last = deltas.take()
    assert first is not None
    assert last is not None
    assert (first.text, last.text) == ("ok", "\ufffd")


def test_scores_name_bytes_of_all_tokens() -> None:
    prompt = scored_prompt(TOKENIZER, [260, 0xF0], [Score(-0.5, 2, ((261, -0.1),))])
    assert (prompt[0].token, prompt[0].logprob) == (b"to", None)
    assert (prompt[1].token, prompt[1].logprob, prompt[1].rank) == (b"\xf0", -0.5, 2)
    assert (prompt[1].top[0].token, prompt[1].top[0].rank) == (b"ken", 1)


CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def reader(thinking: Thinking = Thinking.MAYBE) -> ThinkingParser:
    return ThinkingParser(HermesParser({"f"}), thinking)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_tokens_of_thinking_are_counted_one_by_one(size: int) -> None:
    """However many come at once: its marks count, what follows does not."""
    choice, text = OpenChoice(0), f"<think>Hm.</think>\nOk.{CALL}"
    deltas = maker(choice, parser=reader())
    found = []
    ids = [*text.encode(), EOS_ID]
    for at in range(0, len(ids), size):
        choice.accept(at, ids[at : at + size], [])
        if at + size >= len(ids):
            choice.end = STOP
        delta = deltas.take()
        assert delta is not None
        assert delta.parts is not None
        assert delta.text == "".join(part.text for part in delta.parts if isinstance(part, Text))
        found.append(delta)
    message = fold(part for delta in found for part in delta.parts or ())
    assert (message.reasoning, message.text, message.calls[0].arguments) == ("Hm.", "Ok.", '{"a": 1}')
    assert deltas.reasoning_tokens == len("<think>Hm.</think>")
    assert found[-1].called


def test_without_thinking_nothing_counts() -> None:
    choice = OpenChoice(0)
    deltas = maker(choice, parser=reader())
    choice.accept(0, list(b" <thing>"), [])
    choice.end = LENGTH
    delta = deltas.take()
    assert delta is not None
    assert (delta.text, deltas.reasoning_tokens, delta.called) == (" <thing>", 0, False)
    assert maker(OpenChoice(0)).reasoning_tokens is None


def test_a_stop_string_ends_thinking_and_calls_too() -> None:
    choice = OpenChoice(0)
    deltas = maker(choice, ["Hmm"], parser=ThinkingParser(PlainParser(), Thinking.OPEN))
    choice.accept(0, list(b"So. Hmm</think>"), [])
    delta = deltas.take()
    assert delta is not None
    assert (delta.parts, delta.finish_reason, delta.matched_stop) == ((Reasoning("So."),), STOP, "Hmm")
    assert len(choice.output) == deltas.reasoning_tokens == len("So. Hmm")

    choice = OpenChoice(0)
    deltas = maker(choice, ["}}"], parser=reader(Thinking.NEVER))
    choice.accept(0, list(CALL.encode()), [])
    delta = deltas.take()
    assert delta is not None
    assert delta.parts is not None
    assert delta.parts[:2] == (CallBegin(0, "f"), CallArguments(0, '{"a": 1'))
    assert fold(delta.parts) == Message(CALL[: CALL.index("}}")])
    assert not delta.called


def test_end_ids() -> None:
    model = types_pb2.ModelDescription(eos_token_ids=[1, 2])
    assert end_ids(model, types_pb2.StopCriteria(stop_token_ids=[7])) == {1, 2, 7}
    assert end_ids(model, types_pb2.StopCriteria(stop_token_ids=[7], ignore_eos=True)) == {7}


@pytest.mark.parametrize("stops", [(), ("zzz", "w!")])
def test_whoever_comes_back_gets_the_rest_and_nothing_twice(stops: tuple[str, ...]) -> None:
    """However the output was cut into deltas before, and however much of it is there by now."""
    output = [*"tokens \U0001f600 ä w".encode(), 260, 261, *b"!", EOS_ID]
    whole = OpenChoice(0, output=output, end=STOP, stop_token_id=EOS_ID)
    deltas = maker(whole, stops)
    first = deltas.take()
    assert first is not None
    for length in range(len(whole.output) + 1):
        for there in (length, len(output)):
            choice = OpenChoice(0, output=output[:there])
            shown = maker(OpenChoice(0, output=output[:length]), stops).take()
            after = maker(choice, stops)
            assert after.skip(Seen(there + 1)) is None, "what is not there yet is waited for"
            skipped = after.skip(Seen(length))
            assert skipped is not None
            assert (skipped.seen, skipped.length) == (True, length)
            assert skipped.text == (shown.text if shown is not None else "")
            choice.output[:] = output
            choice.end, choice.stop_token_id = STOP, EOS_ID
            rest = after.take()
            assert rest is not None
            assert skipped.text + rest.text == first.text
            assert [*skipped.token_ids, *rest.token_ids] == list(first.token_ids)
            assert rest.finish_reason == STOP


def test_an_end_that_was_seen_is_not_told_again() -> None:
    choice = OpenChoice(0, output=list(b"abc"), end=LENGTH)
    deltas = maker(choice)
    skipped = deltas.skip(Seen(3, ended=True))
    assert skipped is not None
    assert (skipped.text, skipped.finish_reason) == ("abc", LENGTH)
    assert deltas.finished
    assert deltas.take() is None
    deltas = maker(choice)
    skipped = deltas.skip(Seen(3))
    assert skipped is not None
    assert skipped.finish_reason is None
    last = deltas.take()
    assert last is not None
    assert (last.token_ids, last.finish_reason) == ((), LENGTH)
    with pytest.raises(QuireError, match="last_event_id: choice 0 ended with 3 tokens"):
        maker(choice).skip(Seen(4))
