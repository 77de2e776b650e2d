"""Jinja as authors of chat templates expect it, in a sandbox that bounds what a single step may build."""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment

LARGEST_INTEGER_BITS = 4096
LARGEST_WIDTH = 10_000  # for padding and indenting
WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\*|\d{5})|\{[^{}]*:[^{}]*(\{|\d{5})")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Refuses, besides what Jinja's sandbox refuses, single steps that could exhaust the machine's memory."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, max_characters: int) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
        self._max_characters = max_characters
        narrow = {name: _narrow(self.filters[name]) for name in ("center", "format", "indent", "wordwrap")}
        plain_replace = self.filters["replace"]

        @functools.wraps(plain_replace)
        def replace(eval_ctx: nodes.EvalContext, s: str, old: str, new: str, count: int | None = None) -> str:
            self._check_replacement(str(s), str(old), str(new))
            replaced: str = plain_replace(eval_ctx, s, old, new, count)
            return replaced

        self.filters |= narrow | {"replace": replace, "tojson": _to_json}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def compile_template(self, source: str) -> jinja2.Template:
        """A template whose joins of strings are bounded too."""
        template = self.from_string(source)
        # `a ~ b` compiles to a plain call of this function in the template's own module.
        template.root_render_func.__globals__["str_join"] = self._join
        return template

    def concat(self, parts: Iterable[str]) -> str:  # captured blocks are built with it
        return self._join(parts)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(getattr(__obj, "__self__", None), str):
            _check_narrow(*args, *kwargs.values())
            if __obj.__name__ == "replace" and len(args) > 1:
                __self._check_replacement(__obj.__self__, *args[:2])
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_narrow(value.__self__)
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_narrow(left)
        elif operator == "**" and not _small_power(left, right):
            raise SecurityError("a power is too large")
        elif operator == "*" and not self._small_product(left, right):
            raise SecurityError("a product is too large")
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            self._check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def _join(self, parts: Iterable[Any]) -> str:
        texts = [str(part) for part in parts]
        self._check_size(sum(map(len, texts)))
        return str_join(texts)

    def _check_replacement(self, text: str, old: str, new: str) -> None:
        self._check_size(len(text) + text.count(old) * len(new))

    def _check_size(self, size: int) -> None:
        if size > self._max_characters:
            raise SecurityError("a value is too large")

    def _small_product(self, left: Any, right: Any) -> bool:
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                return len(sequence) * count <= self._max_characters
        if isinstance(left, int) and isinstance(right, int):
            return left.bit_length() + right.bit_length() <= LARGEST_INTEGER_BITS
        return True


def _check_narrow(*arguments: Any) -> None:
    """Refuses numbers and format strings that ask for enormous padding."""
    for argument in arguments:
        if isinstance(argument, int) and argument > LARGEST_WIDTH:
            raise SecurityError("a width is too large")
        if isinstance(argument, str) and WIDE_FORMAT.search(argument):
            raise SecurityError("a format is too wide")


def _narrow(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        if function.__name__ == "do_format":
            _check_narrow(value)
        _check_narrow(*(argument for argument in (*args, *kwargs.values()) if isinstance(argument, int)))
        return function(value, *args, **kwargs)

    return checked


def _small_power(base: Any, exponent: Any) -> bool:
    if isinstance(base, int) and isinstance(exponent, int):
        return base.bit_length() * abs(exponent) <= LARGEST_INTEGER_BITS
    return True


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As model authors expect: plain JSON, without the escaping that Jinja adds for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
