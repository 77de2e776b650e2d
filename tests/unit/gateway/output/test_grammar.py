"""Grammars of calls: what they let a model write, and that the parsers find just that in it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.v1 import gateway_pb2
from quire.v1.types_pb2 import ChoiceList, Constraint
from services.common.constraints.compile import compile_grammar
from services.common.constraints.letters import byte_vocabulary
from services.common.constraints.translate import to_grammar
from services.common.errors import QuireError, Reason
from services.gateway.chat_plan import Reading
from services.gateway.output.parts import fold
from services.gateway.output.template_facts import Style
from services.gateway.output.thinking import Thinking
from services.gateway.output_rule import enforced_schemas, output_rule

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
ANSWER = Constraint(json_schema=json.dumps({"type": "object", "properties": {"x": {"type": "integer"}}}))
REQUIRED, AUTO = gateway_pb2.TOOL_MODE_REQUIRED, gateway_pb2.TOOL_MODE_AUTO


def chat(mode: Any = AUTO, name: str = "", single: bool = False, strict: bool = False) -> gateway_pb2.Chat:
    tools = [
        gateway_pb2.Tool(name="weather", parameters=json.dumps(CITY), strict=strict),
        gateway_pb2.Tool(name="now"),
    ]
    return gateway_pb2.Chat(tools=tools, tool_mode=mode, tool_name=name, single_call=single)


def reading(style: Style = Style.HERMES, thinking: Thinking = Thinking.NEVER) -> Reading:
    return Reading(style, frozenset({"weather", "now"}), thinking)


def accepts(rule: Constraint | None, text: str, special: frozenset[str] = frozenset()) -> bool:
    assert rule is not None
    vocabulary = byte_vocabulary(special)
    matcher = compile_grammar(vocabulary, to_grammar(rule), "constraint")
    ids: list[int] = []
    names = sorted(special - {"<|end|>"})
    while text:
        mark = next((name for name in names if text.startswith(name)), None)
        if mark is not None:
            ids.append(256 + names.index(mark))
            text = text.removeprefix(mark)
        else:
            ids += text[0].encode()
            text = text[1:]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


PARIS = '{"city": "Paris"}'


@pytest.mark.parametrize(
    ("asked", "text", "right"),
    [
        (chat(REQUIRED), hermes("weather", PARIS), True),
        (chat(REQUIRED), hermes("now", "{}"), True),
        (chat(REQUIRED), hermes("weather", PARIS) + "\n" + hermes("now", "{}"), True),
        (chat(REQUIRED, single=True), hermes("weather", PARIS) + "\n" + hermes("now", "{}"), False),
        (chat(REQUIRED), "", False),
        (chat(REQUIRED), "It is nice.", False),
        (chat(REQUIRED), hermes("weather", "{}"), False),
        (chat(REQUIRED), hermes("other", "{}"), False),
        (chat(REQUIRED), hermes("now", '{"x": 1}'), False),
        (chat(REQUIRED, "now"), hermes("now", "{}"), True),
        (chat(REQUIRED, "now"), hermes("weather", PARIS), False),
        (chat(REQUIRED, "now"), hermes("now", "{}") + "\n" + hermes("now", "{}"), False),
        (chat(strict=True), "It is nice.", True),
        (chat(strict=True), "", True),
        (chat(strict=True), "Look:\n" + hermes("weather", PARIS), True),
        (chat(strict=True), hermes("weather", PARIS) + hermes("now", '{"any": 1}') + "\nso", True),
        (chat(strict=True), hermes("weather", '{"town": "Paris"}'), False),
        (chat(strict=True), "Look: <tool_call>nothing", False),
        (chat(single=True), hermes("weather", '{"town": "Paris"}'), True),
        (chat(single=True), hermes("now", "{}") + hermes("now", "{}"), False),
    ],
)
def test_hermes(asked: gateway_pb2.Chat, text: str, right: bool) -> None:
    rule = output_rule(asked, reading(), None, ())
    assert accepts(rule, text) is right
    # The same where the marks are tokens of their own.
    marks = frozenset({"<tool_call>", "</tool_call>"})
    assert accepts(output_rule(asked, reading(), None, marks), text, marks) is right
    if right:
        parser = reading().parser()
        message = fold([*parser.push(text), *parser.finish()])
        assert len(message.calls) == text.count("<tool_call>")


@pytest.mark.parametrize(
    ("asked", "text", "right"),
    [
        (chat(REQUIRED), llama("weather", PARIS), True),
        (chat(REQUIRED), llama("weather", PARIS) + ";" + llama("now", "{}"), False),
        (chat(REQUIRED), "Paris", False),
        (chat(REQUIRED, "weather"), llama("now", "{}"), False),
        (chat(strict=True), llama("weather", PARIS), True),
        (chat(strict=True), llama("weather", '{"town": 1}'), False),
        (chat(strict=True), "It is {nice}.", True),
        (chat(strict=True), "", True),
        (chat(strict=True), '{"free": 1}', False),
    ],
)
def test_llama(asked: gateway_pb2.Chat, text: str, right: bool) -> None:
    assert accepts(output_rule(asked, reading(Style.LLAMA), None, ()), text) is right


@pytest.mark.parametrize(
    ("thinking", "text", "right"),
    [
        (Thinking.NEVER, "<think>Hm.</think>", False),
        (Thinking.MAYBE, "<think>\nHm. <tool_call>\n</think>\n\n", True),
        (Thinking.MAYBE, "", True),
        (Thinking.OPEN, "\nHm.\n</think>\n\n", True),
        (Thinking.OPEN, "", False),
        (Thinking.OPEN, "Hm.", False),
    ],
)
def test_calls_may_come_behind_thinking(thinking: Thinking, text: str, right: bool) -> None:
    rule = output_rule(chat(REQUIRED), reading(thinking=thinking), None, ())
    assert accepts(rule, text + hermes("now", "{}")) is right
    marks = frozenset({"<think>", "</think>"})
    special = output_rule(chat(REQUIRED), reading(thinking=thinking), None, marks)
    assert accepts(special, text + hermes("now", "{}"), marks) is right


@pytest.mark.parametrize(("text", "right"), [('{"x": 1}', True), ('{"x": "1"}', False), ("so", False)])
def test_an_answer_that_is_no_call_obeys_its_own_rule(text: str, right: bool) -> None:
    rule = output_rule(chat(), reading(), ANSWER, ())
    assert accepts(rule, text) is right
    assert accepts(rule, hermes("now", "{}"))
    forced = output_rule(chat(REQUIRED), reading(), ANSWER, ())
    assert not accepts(forced, text)
    assert accepts(forced, hermes("now", "{}"))


@pytest.mark.parametrize(
    ("own", "text", "wrong"),
    [
        (ANSWER, '{"x": 1}', "{}}"),
        (Constraint(json_object=True), "{}", "[]"),
        (Constraint(choice=ChoiceList(values=["a::=b", 'c"'])), 'c"', "d"),
        (Constraint(regex=r"a/b\n[/:]::=\/"), "a/b\n/::=/", "a/b"),
    ],
)
def test_a_rule_begins_behind_thinking_that_the_prompt_opened(own: Constraint, text: str, wrong: str) -> None:
    asked = gateway_pb2.Chat(split_reasoning=True)
    rule = output_rule(asked, Reading(None, frozenset(), Thinking.OPEN), own, ())
    assert accepts(rule, f"Hm. {text}\n</think>\n\n{text}")
    assert not accepts(rule, text)
    assert not accepts(rule, f"Hm.</think>{wrong}")
    assert output_rule(asked, Reading(None, frozenset(), Thinking.MAYBE), own, ()) is own


@pytest.mark.parametrize("own", [Constraint(grammar='root ::= "a"'), Constraint(structural_tag="{}")])
def test_rules_that_go_with_nothing_else(own: Constraint) -> None:
    for asked, how in (
        (chat(), reading()),
        (gateway_pb2.Chat(), Reading(None, frozenset(), Thinking.OPEN)),
        (chat(), reading(Style.LLAMA)),
    ):
        with pytest.raises(QuireError) as caught:
            output_rule(asked, how, own, ())
        assert caught.value.reason is Reason.UNSUPPORTED
        assert caught.value.field.startswith("constraint.")


def test_nothing_is_enforced_that_nobody_asked_for() -> None:
    assert output_rule(chat(), reading(), None, ()) is None
    assert list(enforced_schemas(chat())) == []
    assert [path for path, _ in enforced_schemas(chat(REQUIRED))] == ["chat.tools[0].parameters"]
    assert [path for path, _ in enforced_schemas(chat(strict=True))] == ["chat.tools[0].parameters"]
    assert list(enforced_schemas(chat(REQUIRED, "now"))) == []


def test_a_schema_may_say_what_a_grammar_would_mean() -> None:
    odd = gateway_pb2.Chat(
        tools=[gateway_pb2.Tool(name="f", parameters=json.dumps({"description": "a ::= b\nstart: x"}))],
        tool_mode=REQUIRED,
    )
    assert accepts(output_rule(odd, Reading(Style.LLAMA, frozenset("f"), Thinking.NEVER), None, ()), llama("f", "{}"))
