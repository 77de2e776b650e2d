"""What an output with calls must obey, as a grammar in Lark: forced calls, or text whose calls are right."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.constraints.translate import JSON_OPTIONS
from services.gateway.output import hermes, thinking
from services.gateway.output.template_facts import Style
from services.gateway.output.thinking import Thinking

_LEFT_OUT = ("x-guidance", "$schema")  # the library's own options; a word about the language
_ANYTHING = r"/(.|\n)*/"


@dataclass(frozen=True, slots=True)
class Shape:
    """The calls that are allowed."""

    tools: Mapping[str, Mapping[str, Any]]  # name -> JSON schema of the arguments
    forced: bool  # whether there must be one, and no text
    several: bool  # whether there may be more than one


def calls_grammar(
    style: Style, shape: Shape, begin: Thinking, special: Collection[str], answer: Sequence[str] | None = None
) -> str:
    """`begin` is how the output begins; `special` are the texts of the model's special tokens.

    `answer`, for Hermes alone, are lines that define what the text must be where there is no call; else it is free.
    """
    mark = _Marks(special)
    rules = [f"call: {' | '.join(f'call_{number}' for number in range(len(shape.tools)))}"]
    for number, (name, schema) in enumerate(shape.tools.items()):
        key = "arguments" if style is Style.HERMES else "parameters"
        opening = f'{{"name": {json.dumps(name)}, "{key}": '
        rules.append(f'call_{number}: {text_of(opening)} {json_of(schema)} "}}"')
    body = _hermes(shape, mark, answer) if style is Style.HERMES else _llama(shape)
    return "\n".join([*_start(begin, mark), *body, *rules])


def behind_thinking(answer: Sequence[str], special: Collection[str]) -> str:
    """The grammar of an output that thinks first, for its prompt says so, and then obeys the lines of `answer`."""
    return "\n".join(["start: thinking answer", *_thinking(_Marks(special)), *answer])


def json_of(schema: Mapping[str, Any]) -> str:
    """JSON of a schema, as a part of a grammar."""
    plain = {key: value for key, value in schema.items() if key not in _LEFT_OUT}
    return f"%json {text_of(plain | {'x-guidance': dict(JSON_OPTIONS)})}"


def text_of(value: Any) -> str:
    """JSON that goes into a grammar, without the mark by which EBNF is told from Lark."""
    return json.dumps(value, ensure_ascii=False).replace("::=", r"\u003a:=")


class _Marks:
    """Marks as a grammar writes them: special tokens are named, others are text."""

    def __init__(self, special: Collection[str]) -> None:
        self._special = special

    def __call__(self, mark: str) -> str:
        return mark if mark in self._special else text_of(mark)

    def up_to(self, name: str, mark: str) -> Iterator[str]:
        """A rule of text that ends with the mark."""
        lexeme = f"{name.upper()}_TEXT"
        if mark in self._special:  # text never holds a special token
            yield f"{name}: {lexeme} {mark}"
        else:  # a lazy lexeme ends at once where its mark is complete
            yield f"{name}[lazy]: {lexeme} {text_of(mark)}"
        yield f"{lexeme}: {_ANYTHING}"


def _start(begin: Thinking, mark: _Marks) -> Iterator[str]:
    match begin:
        case Thinking.NEVER:
            yield "start: body"
        case Thinking.OPEN:
            yield "start: thinking body"
            yield from _thinking(mark)
        case Thinking.MAYBE:
            yield f"start: body | {mark(thinking.BEGIN)} thinking body"
            yield from _thinking(mark)


def _thinking(mark: _Marks) -> Iterator[str]:
    yield "thinking: thought BLANKS?"
    yield r"BLANKS: /[ \n]{1,8}/"
    yield from mark.up_to("thought", thinking.END)


def _hermes(shape: Shape, mark: _Marks, answer: Sequence[str] | None) -> Iterator[str]:
    inner = rf'"\n" call "\n" {mark(hermes.END)}'
    if shape.forced or answer is not None:
        yield f"one: {mark(hermes.BEGIN)} {inner}"
        calls = r'one ("\n" one)*' if shape.several else "one"
        yield f"body: {calls}" if answer is None else f"body: {calls} | answer"
        yield from answer or ()
        return
    yield f"one: opening {inner}"
    # As soon as a mark is complete its lexeme is over, so text without a call has none.
    yield "body: one* rest" if shape.several else "body: one | rest"
    yield "rest: REST"
    yield f"REST: {_ANYTHING}"
    yield from mark.up_to("opening", hermes.BEGIN)


def _llama(shape: Shape) -> Iterator[str]:
    """One call, for templates take no more. Free text does not begin with a brace: else calls were free, too."""
    yield "body: call" if shape.forced else "body: call | FREE"
    if not shape.forced:
        yield r"FREE: /([^{ \t\r\n](.|\n)*)?/"
