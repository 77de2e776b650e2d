"""What requests may say: one row per rule."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from quire.v1 import gateway_pb2, types_pb2
from services.common.errors import QuireError, Reason
from services.gateway import validation

VOCAB = 100
MODEL = types_pb2.ModelDescription(name="m", vocab_size=VOCAB, context_length=16)


def check(**fields: Any) -> None:
    if not {"text", "token_ids", "chat"} & fields.keys():
        fields["text"] = "x"
    validation.validate(gateway_pb2.GenerationInput(**fields), MODEL, max_prompt_bytes=50)


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": types_pb2.SamplingParams(**fields)}


def stop(**fields: Any) -> dict[str, Any]:
    return {"stop": types_pb2.StopCriteria(**fields)}


def ids(*values: int) -> dict[str, Any]:
    return {"token_ids": gateway_pb2.TokenIds(ids=values)}


def chat(*messages: dict[str, str]) -> dict[str, Any]:
    return {"chat": gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage(**message) for message in messages])}


GOOD: list[dict[str, Any]] = [
    {},
    *(sampling(temperature=value) for value in (0, 1e-6, 1, 100)),
    *(sampling(top_k=value) for value in (-1, 0, 1, VOCAB, 10**7)),  # B5
    *(sampling(top_p=value) for value in (0, 1e-9, 1)),
    *(sampling(min_p=value) for value in (0, 1)),
    *(sampling(repetition_penalty=value) for value in (1e-9, 1, 100)),
    *(sampling(presence_penalty=value, frequency_penalty=value) for value in (-2, 0, 2)),
    sampling(logit_bias={0: -100, VOCAB - 1: 100}),
    *(sampling(seed=value) for value in (-(2**63), 0, 2**63 - 1)),
    stop(max_tokens=1),
    stop(max_tokens=5, min_tokens=5),
    stop(stop_token_ids=[0, VOCAB - 1], ignore_eos=True),
    stop(stop=["x" * 1024] * 16, include_stop=True),
    *({"logprobs": types_pb2.LogprobOptions(output_count=count, prompt_count=count)} for count in (None, 0, 1, 20)),
    *({"choice_count": count} for count in (0, 1, 64)),
    *({"priority": value} for value in (-100, 100)),
    {"request_id": "~ ok" + "x" * 124},
    {"speculation": "off"},
    {"speculation": "auto"},
    {"speculation": "0"},
    {"speculation": "16"},
    {"speculation": "off", "beam_width": 2},
    {"speculation": "auto", "beam_width": 2},
    {"beam_width": 4, "choice_count": 4, "length_penalty": -10.0} | sampling(temperature=0, top_p=1, seed=3),
    {"text": ""},  # whether it holds a token is seen behind the tokenizer
    {"text": "x" * 50},
    ids(0, VOCAB - 1),
    ids(*[1] * 15),
    chat({"role": "user", "content": ""}),
]

INVALID, UNSUPPORTED, EXCEEDED, LARGE = (
    Reason.INVALID_FIELD,
    Reason.UNSUPPORTED,
    Reason.CONTEXT_EXCEEDED,
    Reason.TOO_LARGE,
)
NOT_FINITE = (math.nan, math.inf, -math.inf)

BAD: list[tuple[dict[str, Any], str, Reason]] = [
    *(  # B4: no number that is not finite, in any field that can carry one
        (sampling(**{name: value}), f"sampling.{name}", INVALID)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        for value in (*NOT_FINITE, -1e9, 1e9)
    ),
    (sampling(temperature=-0.01), "sampling.temperature", INVALID),
    (sampling(temperature=100.01), "sampling.temperature", INVALID),
    (sampling(top_k=-2), "sampling.top_k", INVALID),
    (sampling(top_p=-1), "sampling.top_p", INVALID),
    (sampling(top_p=1.5), "sampling.top_p", INVALID),
    (sampling(min_p=-0.1), "sampling.min_p", INVALID),
    (sampling(min_p=1.1), "sampling.min_p", INVALID),
    (sampling(repetition_penalty=0), "sampling.repetition_penalty", INVALID),
    (sampling(repetition_penalty=1e-44), "sampling.repetition_penalty", INVALID),
    (sampling(repetition_penalty=100.5), "sampling.repetition_penalty", INVALID),
    (sampling(presence_penalty=2.1), "sampling.presence_penalty", INVALID),
    (sampling(frequency_penalty=-2.1), "sampling.frequency_penalty", INVALID),
    *((sampling(logit_bias={5: value}), "sampling.logit_bias[5]", INVALID) for value in (*NOT_FINITE, 100.1, -101)),
    # B6: ids outside the model's vocabulary, in every field that takes ids
    *((sampling(logit_bias={bad: 0.0}), "sampling.logit_bias", INVALID) for bad in (-1, VOCAB, 2**31 - 1)),
    *((stop(stop_token_ids=[0, bad]), "stop.stop_token_ids", INVALID) for bad in (-1, VOCAB, 2**31 - 1)),
    *((ids(0, bad), "token_ids", INVALID) for bad in (-1, VOCAB, 2**31 - 1)),
    (stop(max_tokens=0), "stop.max_tokens", INVALID),
    (stop(max_tokens=-1), "stop.max_tokens", INVALID),
    (stop(min_tokens=-1), "stop.min_tokens", INVALID),
    (stop(max_tokens=3, min_tokens=4), "stop.min_tokens", INVALID),
    (stop(stop=[""]), "stop.stop", INVALID),
    (stop(stop=["x" * 1025]), "stop.stop", INVALID),
    # B8: counts over the limit
    *(({"logprobs": types_pb2.LogprobOptions(output_count=n)}, "logprobs.output_count", INVALID) for n in (-1, 21)),
    *(({"logprobs": types_pb2.LogprobOptions(prompt_count=n)}, "logprobs.prompt_count", INVALID) for n in (-1, 21)),
    # S5: bombs
    ({"choice_count": 10**6}, "choice_count", INVALID),
    ({"choice_count": 65}, "choice_count", INVALID),
    ({"choice_count": -1}, "choice_count", INVALID),
    ({"logprobs": types_pb2.LogprobOptions(output_count=10**9)}, "logprobs.output_count", INVALID),
    (stop(stop=["x"] * 10**5), "stop.stop", INVALID),
    (stop(stop_token_ids=[1] * 10**6), "stop.stop_token_ids", INVALID),
    (sampling(logit_bias=dict.fromkeys(range(10**5), 1.0)), "sampling.logit_bias", INVALID),
    (chat(*[{"role": "user"}] * 10_001), "chat.messages", INVALID),
    ({"priority": 101}, "priority", INVALID),
    ({"priority": -101}, "priority", INVALID),
    ({"request_id": "x" * 129}, "request_id", INVALID),
    ({"request_id": "a\nb"}, "request_id", INVALID),
    ({"request_id": "ü"}, "request_id", INVALID),
    ({"adapter": "a"}, "adapter", UNSUPPORTED),
    ({"constraint": types_pb2.Constraint()}, "constraint", INVALID),
    ({"constraint": types_pb2.Constraint(regex="")}, "constraint.regex", INVALID),
    ({"constraint": types_pb2.Constraint(regex="a" * 10**6)}, "constraint.regex", INVALID),
    ({"constraint": types_pb2.Constraint(json_object=False)}, "constraint.json_object", INVALID),
    ({"constraint": types_pb2.Constraint(regex="a"), "beam_width": 2}, "constraint", UNSUPPORTED),
    *(({"speculation": text}, "speculation", INVALID) for text in ("17", "-1", "04", "on", "4.0", "\u0664", " 4")),
    ({"speculation": "4", "beam_width": 2}, "speculation", UNSUPPORTED),
    ({"beam_width": 33}, "beam_width", INVALID),
    ({"beam_width": -1}, "beam_width", INVALID),
    ({"beam_width": 2, "choice_count": 3}, "choice_count", INVALID),
    ({"length_penalty": 1.0}, "length_penalty", INVALID),
    ({"beam_width": 2, "length_penalty": 11.0}, "length_penalty", INVALID),
    ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty", INVALID),
    ({"beam_width": 2} | sampling(temperature=1.0), "sampling.temperature", INVALID),
    ({"beam_width": 2} | sampling(top_k=1), "sampling.top_k", INVALID),
    ({"beam_width": 2} | sampling(presence_penalty=1.0), "sampling.presence_penalty", INVALID),
    ({"beam_width": 2} | sampling(logit_bias={1: 1.0}), "sampling.logit_bias", INVALID),
    ({"beam_width": 2} | stop(stop=["x"]), "stop.stop", UNSUPPORTED),
    ({"beam_width": 2, "logprobs": types_pb2.LogprobOptions(prompt_count=0)}, "logprobs.prompt_count", UNSUPPORTED),
    # C1, C2
    (ids(), "token_ids", INVALID),
    (chat(), "chat.messages", INVALID),
    (chat({"content": "x"}), "chat.messages[0].role", INVALID),
    (ids(*[1] * 16), "prompt", EXCEEDED),
    ({"text": "x" * 51}, "text", LARGE),
    ({"text": "ü" * 26}, "text", LARGE),
    (chat({"role": "user", "content": "x" * 30}, {"role": "user", "content": "x" * 20}), "chat", LARGE),
]


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_accepted(fields: dict[str, Any]) -> None:
    check(**fields)


@pytest.mark.parametrize(("fields", "path", "reason"), BAD, ids=lambda value: str(value)[:60])
def test_refused_by_name(fields: dict[str, Any], path: str, reason: Reason) -> None:
    """B4 B6 B8 C1 S5: each refusal names its field."""
    with pytest.raises(QuireError) as caught:
        check(**fields)
    assert (caught.value.field, caught.value.reason) == (path, reason)


def test_no_prompt_at_all() -> None:
    with pytest.raises(QuireError, match="prompt: one of"):
        validation.validate(gateway_pb2.GenerationInput(), MODEL, 50)


@pytest.mark.parametrize(
    ("length", "max_tokens", "min_tokens", "expected"),
    [
        (1, None, 0, 15),
        (14, None, 0, 2),
        (15, None, 0, 1),
        (15, 1, 0, 1),
        (15, 2, 0, "stop.max_tokens"),
        (14, 2, 2, 2),
        (14, None, 3, "stop.min_tokens"),
        (16, None, 0, "prompt"),
        (16, 1, 0, "prompt"),
        (17, None, 0, "prompt"),
        (1, 2**31 - 1, 0, "stop.max_tokens"),
    ],
)
def test_budget_table(length: int, max_tokens: int | None, min_tokens: int, expected: int | str) -> None:
    """C2: what the context of 16 leaves."""
    criteria = types_pb2.StopCriteria(max_tokens=max_tokens, min_tokens=min_tokens)
    if isinstance(expected, int):
        assert validation.resolve_max_tokens(length, criteria, 16) == expected
        return
    with pytest.raises(QuireError) as caught:
        validation.resolve_max_tokens(length, criteria, 16)
    assert (caught.value.reason, caught.value.field) == (Reason.CONTEXT_EXCEEDED, expected)


def test_prompt_scores_are_bounded() -> None:
    """S5: alternatives for every token of a long prompt."""
    validation.check_prompt_scores(10**6, types_pb2.LogprobOptions())
    validation.check_prompt_scores(20_000, types_pb2.LogprobOptions(prompt_count=20))
    with pytest.raises(QuireError, match=r"logprobs\.prompt_count"):
        validation.check_prompt_scores(30_000, types_pb2.LogprobOptions(prompt_count=20))


def test_s5_calls_of_a_chat_are_counted_before_they_are_read() -> None:
    call = gateway_pb2.ToolCall(id="1", name="f", arguments="{}")
    message = gateway_pb2.ChatMessage(role="assistant", tool_calls=[call] * 128)
    calls = gateway_pb2.Chat(messages=[message] * 33)
    started = time.thread_time()
    with pytest.raises(QuireError) as caught:
        validation.check_chat(calls, 1 << 20)
    assert caught.value.field == "chat.messages[32].tool_calls"
    assert time.thread_time() - started < 1
    del calls.messages[32:]
    validation.check_chat(calls, 1 << 20)
    with pytest.raises(QuireError) as caught:
        validation.check_chat(calls, 1000)
    assert caught.value.reason is Reason.TOO_LARGE
