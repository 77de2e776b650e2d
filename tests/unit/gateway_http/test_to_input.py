"""What a body becomes on the engine's side."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.v1.gateway_pb2 import GenerationInput
from quire.v1.types_pb2 import ChoiceList, Constraint
from services.common.errors import invalid
from services.gateway.http.errors import HttpError, from_quire
from services.gateway.http.schemas import ChatRequest, CompletionRequest
from services.gateway.http.to_input import Job, chat_job, completion_job

CHAT = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> Job:
    return completion_job(CompletionRequest.model_validate({"prompt": "hi"} | fields))


def chat(**fields: Any) -> Job:
    return chat_job(ChatRequest.model_validate({"messages": CHAT} | fields))


def test_every_field_arrives_under_its_own_name() -> None:
    one = completion(
        model="m",
        n=2,
        max_tokens=5,
        temperature=0,
        top_p=0.5,
        presence_penalty=0.25,
        frequency_penalty=-0.25,
        logit_bias={"7": -100},
        seed=-3,
        stop="end",
        top_k=9,
        min_p=0.1,
        repetition_penalty=1.5,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[4],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=0,
        prompt_logprobs=3,
        priority=-5,
        speculation=4,
    ).inputs[0]
    expected = GenerationInput(
        model="m", text="hi", choice_count=2, priority=-5, keep_special_tokens=True, speculation="4"
    )
    sampling, stop = expected.sampling, expected.stop
    sampling.temperature, sampling.top_p, sampling.presence_penalty, sampling.frequency_penalty = 0, 0.5, 0.25, -0.25
    sampling.logit_bias[7], sampling.seed, sampling.top_k, sampling.min_p = -100, -3, 9, 0.1
    sampling.repetition_penalty = 1.5
    stop.max_tokens, stop.min_tokens, stop.ignore_eos, stop.include_stop = 5, 2, True, True
    stop.stop.append("end")
    stop.stop_token_ids.append(4)
    expected.logprobs.output_count, expected.logprobs.prompt_count = 0, 3
    assert one == expected


def test_what_is_not_said_stays_unset() -> None:
    one = chat(temperature=None, stop=None, n=None, seed=None).inputs[0]
    assert not one.sampling.ListFields()
    assert not one.stop.ListFields()
    assert not one.logprobs.ListFields()
    assert one.choice_count == 1


@pytest.mark.parametrize(
    ("fields", "budget", "by_default"),
    [({}, 16, True), ({"max_tokens": 3}, 3, False), ({"max_tokens": None}, 16, True), ({"min_tokens": 20}, 20, True)],
)
def test_text_has_the_budget_of_openai(fields: dict[str, Any], budget: int, by_default: bool) -> None:
    job = completion(**fields)
    assert (job.inputs[0].stop.max_tokens, job.default_budget) == (budget, by_default)


@pytest.mark.parametrize(("stated", "said"), [(None, ""), ("auto", "auto"), ("off", "off"), (0, "0"), ("8", "8")])
def test_speculation_is_a_word_or_a_number(stated: str | int | None, said: str) -> None:
    assert chat(speculation=stated).inputs[0].speculation == said


def test_chat_has_the_budget_that_the_context_leaves() -> None:
    assert not chat().inputs[0].stop.HasField("max_tokens")
    assert chat(max_completion_tokens=4).inputs[0].stop.max_tokens == 4
    assert chat(max_completion_tokens=4, max_tokens=4).inputs[0].stop.max_tokens == 4


@pytest.mark.parametrize(
    ("prompt", "texts", "ids"),
    [
        ("a", ["a"], []),
        (["a", ""], ["a", ""], []),
        ([1, 2], [], [[1, 2]]),
        ([[1], [2, 3]], [], [[1], [2, 3]]),
        ([[]], [], [[]]),
    ],
)
def test_prompts_become_one_input_each(prompt: Any, texts: list[str], ids: list[list[int]]) -> None:
    inputs = completion(prompt=prompt).inputs
    if ids:
        assert [list(one.token_ids.ids) for one in inputs] == ids
    else:
        assert [one.text for one in inputs] == texts
    assert all(one.WhichOneof("prompt") == ("token_ids" if ids else "text") for one in inputs)


def test_content_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts, "name": "eve"}]
    result = chat(messages=messages).inputs[0].chat.messages
    assert [(one.role, one.content, one.name) for one in result] == [
        ("system", "be brief", ""),
        ("user", "a\nb", "eve"),
    ]


@pytest.mark.parametrize(
    ("logprobs", "alternatives"), [({}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 5}, 5)]
)
def test_chat_logprobs(logprobs: dict[str, Any], alternatives: int | None) -> None:
    """B8: on without a count means the chosen token's own value."""
    options = chat(**logprobs).inputs[0].logprobs
    assert (options.output_count if options.HasField("output_count") else None) == alternatives


@pytest.mark.parametrize(
    ("make", "fields", "width", "param"),
    [
        (chat, {"use_beam_search": True}, 1, "n"),
        (chat, {"use_beam_search": True, "n": 3}, 3, "n"),
        (chat, {"use_beam_search": False, "n": 3}, 0, "n"),
        (completion, {"use_beam_search": True, "n": 2, "length_penalty": 0.5}, 2, "n"),
        (completion, {"use_beam_search": True, "n": 2, "best_of": 5}, 5, "best_of"),
    ],
)
def test_beam_search_is_as_wide_as_best_of_or_n(make: Any, fields: dict[str, Any], width: int, param: str) -> None:
    job = make(**fields)
    one = job.inputs[0]
    assert (one.beam_width, one.choice_count) == (width, fields.get("n", 1))
    assert job.names["beam_width"] == param
    assert one.HasField("length_penalty") == ("length_penalty" in fields)


@pytest.mark.parametrize(
    ("make", "fields", "param"),
    [
        (chat, {"top_logprobs": 2}, "top_logprobs"),
        (chat, {"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        (chat, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        (chat, {"stream_options": {"include_usage": True}}, "stream_options"),
        (completion, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (completion, {"best_of": 2}, "best_of"),
        (completion, {"best_of": 0, "use_beam_search": True}, "best_of"),
        (completion, {"n": 64, "prompt": ["a"] * 17}, "n"),
    ],
)
def test_contradictions_are_refused_by_name(make: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpError) as caught:
        make(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("job", "path", "param"),
    [
        (completion(), "sampling.temperature", "temperature"),
        (completion(), "sampling.logit_bias[5]", "logit_bias[5]"),
        (completion(), "stop.stop", "stop"),
        (completion(), "stop.include_stop", "include_stop_str_in_output"),
        (completion(), "choice_count", "n"),
        (completion(), "text", "prompt"),
        (completion(), "token_ids", "prompt"),
        (completion(), "prompt", "prompt"),
        (completion(), "logprobs.output_count", "logprobs"),
        (completion(), "stop.max_tokens", "max_tokens"),
        (chat(), "prompt", "messages"),
        (chat(), "chat.messages[3].role", "messages[3].role"),
        (chat(logprobs=True), "logprobs.output_count", "top_logprobs"),
        (chat(max_completion_tokens=1), "stop.max_tokens", "max_completion_tokens"),
        (chat(), "input.sampling.seed", "seed"),
        (chat(), "samplings.seed", "samplings.seed"),
    ],
)
def test_errors_name_the_field_that_the_client_wrote(job: Job, path: str, param: str) -> None:
    error = from_quire(invalid(path, "is odd"), job.names)
    assert (error.param, error.message) == (param, f"{param}: is odd")


SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
SCHEMA_TEXT = '{"type":"object","properties":{"é":{"type":"integer"}}}'
TAGS = {"type": "structural_tag", "structures": [{"begin": "<", "schema": {}, "end": ">"}], "triggers": ["<"]}
TRIGGERED = {"type": "structural_tag", "format": {"type": "triggered_tags"}}


@pytest.mark.parametrize(
    ("fields", "rule", "name"),
    [
        ({"response_format": {"type": "json_object"}}, Constraint(json_object=True), "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            Constraint(json_schema=SCHEMA_TEXT),
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, Constraint(json_schema=SCHEMA_TEXT), "structured_outputs.json"),
        ({"structured_outputs": {"json": "{}"}}, Constraint(json_schema="{}"), "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a"}}, Constraint(regex="a"), "structured_outputs.regex"),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            Constraint(choice=ChoiceList(values=["a", "b"])),
            "structured_outputs.choice",
        ),
        ({"structured_outputs": {"grammar": "g"}}, Constraint(grammar="g"), "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": True}}, Constraint(json_object=True), "structured_outputs.json_object"),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            Constraint(structural_tag="{}"),
            "structured_outputs.structural_tag",
        ),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "x"}, Constraint(json_schema=SCHEMA_TEXT), "guided_json"),
        ({"guided_regex": "a"}, Constraint(regex="a"), "guided_regex"),
        ({"guided_choice": ["a"]}, Constraint(choice=ChoiceList(values=["a"])), "guided_choice"),
        ({"guided_grammar": "g"}, Constraint(grammar="g"), "guided_grammar"),
    ],
)
def test_rules_of_outputs_and_their_names(fields: dict[str, Any], rule: Constraint, name: str) -> None:
    for job in (chat(**fields), completion(**fields)):
        assert all(one.constraint == rule for one in job.inputs)
        path = f"constraint.{rule.WhichOneof('rule')}"
        error = from_quire(invalid(path, "is wrong"), job.names)
        assert (error.param, error.message) == (name, f"{name}: is wrong")


@pytest.mark.parametrize("wanted", [TAGS, TRIGGERED])
def test_structural_tags_go_on_as_they_are(wanted: dict[str, Any]) -> None:
    job = chat(response_format=wanted)
    assert json.loads(job.inputs[0].constraint.structural_tag) == wanted
    inner = from_quire(invalid("constraint.structural_tag.structures[0]", "is wrong"), job.names)
    assert inner.param == "response_format.structures[0]"


def test_plain_text_is_no_rule() -> None:
    for job in (chat(), chat(response_format={"type": "text"}), chat(response_format=None, structured_outputs=None)):
        assert not job.inputs[0].HasField("constraint")
