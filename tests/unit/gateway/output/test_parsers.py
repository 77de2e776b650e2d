"""Thinking, calls and text are told apart, however the output is cut into pieces; nothing is lost or told twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.gateway.output.hermes import HermesParser
from services.gateway.output.llama import LlamaParser
from services.gateway.output.parts import (
    Call,
    CallArguments,
    CallBegin,
    CallFault,
    Message,
    Parser,
    Part,
    PlainParser,
    Text,
    fold,
    merged,
    visible,
)
from services.gateway.output.thinking import Thinking, ThinkingParser

TOOLS = frozenset({"f", "get_weather"})
MAKERS: dict[str, Callable[[], Parser]] = {
    "hermes": lambda: HermesParser(TOOLS),
    "llama": lambda: LlamaParser(TOOLS),
    "thinking": lambda: ThinkingParser(HermesParser(TOOLS), Thinking.MAYBE),
    "open thinking": lambda: ThinkingParser(LlamaParser(TOOLS), Thinking.OPEN),
    "plain": PlainParser,
}


def read(parser: Parser, pieces: Iterable[str]) -> list[Part]:
    """All parts, neighbours of one kind joined."""
    return [*merged([part for piece in pieces for part in parser.push(piece)] + parser.finish())]


def hermes(*pieces: str) -> Message:
    return fold(read(HermesParser(TOOLS), pieces))


def llama(*pieces: str) -> Message:
    return fold(read(LlamaParser(TOOLS), pieces))


CALL = '{"name": "f", "arguments": {"a": [1, "}"]}}'
ARGUMENTS = '{"a": [1, "}"]}'


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>", "", [("f", ARGUMENTS)]),
        (f"Let me look.\n<tool_call>\n{CALL}\n</tool_call>", "Let me look.", [("f", ARGUMENTS)]),
        (
            f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>\nDone.\n",
            "Done.\n",
            [("f", ARGUMENTS), ("f", ARGUMENTS)],
        ),
        ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [("f", '{"x": 1}')]),
        ('<tool_call>{"name": "f", "parameters": {}}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"type": "function", "id": "x", "name": "f", "arguments": {}}</tool_call>', "", [("f", "{}")]),
        (f"<tool_call>{CALL}", "", [("f", ARGUMENTS)]),  # the output ended without the closing mark
        (f"<tool_call>{CALL} and more", "and more", [("f", ARGUMENTS)]),
        ("a < b <tool b> <tool_calls>", "a < b <tool b> <tool_calls>", []),
        ("  blanks stay  \n", "  blanks stay  \n", []),
    ],
)
def test_hermes(text: str, said: str, calls: list[tuple[str, str]]) -> None:
    message = hermes(text)
    assert (message.text, [(call.name, call.arguments) for call in message.calls]) == (said, calls)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>not JSON</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}, "name": "unknown"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "\n"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}, "more": 1}</tool_call>',
        '<tool_call>{"name": "f", "name": "f"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": ',
        '<tool_call>{"name": "f", "arg',
        "<tool_call>",
        "<tool_ca",
        " \n<tool_call> {",
        '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 100 + "]" * 100 + "}}</tool_call>",
        '<tool_call>{"name": "' + "f" * 5000 + '", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    """Nothing is lost: a whole answer shows all that was written."""
    assert hermes(text) == Message(text)
    assert hermes(*text) == Message(text)


def test_what_breaks_while_it_streams() -> None:
    """What was told stays told; the rest is text, and whoever can takes the call back."""
    parts = read(HermesParser(TOOLS), ['<tool_call>{"name": "f", "arguments": {"a": 1,', "}}</tool_call>x"])
    assert parts == [
        CallBegin(0, "f"),
        CallArguments(0, '{"a": 1,'),
        CallFault(0, '<tool_call>{"name": "f", "arguments": {"a": 1,'),
        Text("}}</tool_call>x"),
    ]
    after = read(HermesParser(TOOLS), ['<tool_call>{"name": "f", "arguments": {x', f"<tool_call>{CALL}</tool_call>"])
    assert [part.index for part in after if isinstance(part, CallBegin)] == [0, 1]
    assert [call.index for call in fold(after).calls] == [1]


def test_arguments_stream_as_they_are_written() -> None:
    parser = HermesParser(TOOLS)
    assert parser.push('<tool_call>\n{"name": "get_weather", ') == []
    assert parser.push('"arguments": {"ci') == [CallBegin(0, "get_weather"), CallArguments(0, '{"ci')]
    assert parser.push('ty": "Par') == [CallArguments(0, 'ty": "Par')]
    assert parser.push('is"}') == [CallArguments(0, 'is"}')]
    assert parser.push("}\n</tool_call>") == []
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ('{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ('\n\n{"name": "f", "parameters": {"a": 1}}\n', "", [("f", '{"a": 1}')]),
        ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ('I look.\n<|python_tag|>{"name": "f", "parameters": {}}', "I look.", [("f", "{}")]),
        (
            '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {"b": 2}}',
            "",
            [("f", "{}"), ("f", '{"b": 2}')],
        ),
        ('{"name": "f", "parameters": {}} Done.', "Done.", [("f", "{}")]),
        ('{"name": "f", "parameters": {}}; so', "; so", [("f", "{}")]),
        ('{"answer": 5}', '{"answer": 5}', []),
        ('Say {"name": "f", "parameters": {}}', 'Say {"name": "f", "parameters": {}}', []),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ("<|python", "<|python", []),
        (" ", " ", []),
        ("{", "{", []),
    ],
)
def test_llama(text: str, said: str, calls: list[tuple[str, str]]) -> None:
    message = llama(text)
    assert (message.text, [(call.name, call.arguments) for call in message.calls]) == (said, calls)


@pytest.mark.parametrize(
    ("begin", "text", "reasoning", "said"),
    [
        (Thinking.MAYBE, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (Thinking.MAYBE, "\n<think>Hm.</think>Yes.", "Hm.", "Yes."),
        (Thinking.MAYBE, "Yes <think>no</think>", "", "Yes <think>no</think>"),
        (Thinking.MAYBE, "<thin", "", "<thin"),
        (Thinking.MAYBE, " Yes", "", " Yes"),
        (Thinking.MAYBE, "<think>Hm", "Hm", ""),
        (Thinking.OPEN, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (Thinking.OPEN, "Hm. 1 < 2 </thin", "Hm. 1 < 2 </thin", ""),
        (Thinking.OPEN, "</think>Yes.", "", "Yes."),
        (Thinking.NEVER, "<think>Hm.</think>", "", "<think>Hm.</think>"),
    ],
)
def test_thinking(begin: Thinking, text: str, reasoning: str, said: str) -> None:
    assert fold(read(ThinkingParser(PlainParser(), begin), [text])) == Message(said, reasoning)
    assert fold(read(ThinkingParser(PlainParser(), begin), text)) == Message(said, reasoning)


def test_calls_follow_thinking() -> None:
    text = f"<think>a call: <tool_call>{CALL}</tool_call></think>\n<tool_call>{CALL}</tool_call>"
    message = fold(read(ThinkingParser(HermesParser(TOOLS), Thinking.MAYBE), [text]))
    assert message == Message("", f"a call: <tool_call>{CALL}</tool_call>", [Call(0, "f", ARGUMENTS)])


FRAGMENTS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<think>",
            "</think>",
            "<|python_tag|>",
            "<tool",
            "</",
            "<",
            "\n",
            " ",
            ";",
            "x",
        ),
        *(
            '{"name": "f", "arguments": ',
            '{"name": "f", "parameters": ',
            '{"arguments": ',
            ', "name": "f"}',
            '{"name": "f"}',
        ),
        *(
            "{}",
            '{"a": ',
            "[1, 2.5e3",
            "]",
            "}",
            ",",
            "true",
            "nul",
            '"é\\n\\u00e9"',
            '"\\x"',
            '"open',
            "-0",
            "01",
            "{",
            '"',
        ),
        *(CALL, f"<tool_call>\n{CALL}\n</tool_call>"),
    ]
)


@pytest.mark.parametrize("name", MAKERS)
@settings(deadline=None)
@given(fragments=st.lists(FRAGMENTS, max_size=14), cuts=st.lists(st.integers(1, 7), min_size=1, max_size=30))
@example(fragments=[f"<tool_call>{CALL}</tool_call>"], cuts=[1])
def test_any_cut_gives_the_same(name: str, fragments: list[str], cuts: list[int]) -> None:
    text = "".join(fragments)
    whole = read(MAKERS[name](), [text])
    assert read(MAKERS[name](), text) == whole
    pieces, at = [], 0
    while at < len(text):
        size = cuts[len(pieces) % len(cuts)]
        pieces.append(text[at : at + size])
        at += size
    assert read(MAKERS[name](), pieces) == whole


@pytest.mark.parametrize("name", ["hermes", "llama", "plain"])
@settings(deadline=None)
@given(fragments=st.lists(FRAGMENTS, max_size=14))
def test_nothing_is_lost_and_every_call_is_whole(name: str, fragments: list[str]) -> None:
    text = "".join(fragments)
    parts = read(MAKERS[name](), [text])
    message = fold(parts)
    for call in message.calls:
        assert call.name in TOOLS
        assert isinstance(json.loads(call.arguments), dict)
    if not message.calls:
        assert message.text == text
    rest = iter(text)
    assert all(letter in rest for letter in message.text), "text that was not written, or not in this order"
    assert len(visible(parts)) <= len(message.text)
