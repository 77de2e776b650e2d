"""Chat templates: Jinja in a sandbox, with a budget of CPU time and of output.

A template is part of a model, so it is code from elsewhere. It sees the messages and nothing else, cannot change
them, and is ended when it runs too long or writes too much.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jinja2
import jinja2.meta

from services.common.errors import QuireError, Reason, invalid
from services.gateway.output.template_facts import SWITCH, TemplateFacts, facts_of
from services.gateway.template_sandbox import TemplateSandbox


class BudgetExceeded(BaseException):
    """Ends a rendering. Not an Exception, so that nothing in between swallows it."""


class ChatTemplate:
    """One model's template. Rendering may be called from any thread, and holds that thread for its whole time."""

    def __init__(
        self,
        source: str,
        special_strings: Mapping[str, str],
        *,
        cpu_seconds: float = 2.0,
        max_characters: int = 16 * 1024 * 1024,
    ) -> None:
        self._cpu_seconds, self._max_characters = cpu_seconds, max_characters
        self._special_strings = dict(special_strings)
        sandbox = TemplateSandbox(max_characters)
        try:
            self._template = sandbox.compile_template(source)
            self.facts: TemplateFacts = facts_of(source, jinja2.meta.find_undeclared_variables(sandbox.parse(source)))
        except (jinja2.TemplateError, RecursionError) as error:
            raise QuireError(Reason.MODEL_LOAD_FAILED, f"the model's chat template is broken: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | None = None,
    ) -> str:
        """The prompt text, up to where the assistant's answer begins.

        `tools` are as OpenAI writes them; `thinking` tells templates that can be told whether the model shall think.
        """
        variables: dict[str, Any] = {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": True,
            "tools": [dict(tool) for tool in tools] or None,
            "documents": None,
        }
        if thinking is not None:
            variables[SWITCH] = thinking
        parts: list[str] = []
        room = self._max_characters
        try:
            with _cpu_limit(self._cpu_seconds):
                for part in self._template.generate(self._special_strings, **variables):
                    parts.append(part)
                    room -= len(part)
                    if room < 0:
                        raise BudgetExceeded(f"wrote more than {self._max_characters} characters")
        except BudgetExceeded as error:
            raise invalid("chat", f"the model's chat template {error} on these messages") from None
        except jinja2.TemplateError as error:
            raise invalid("chat", f"the model's chat template refuses these messages: {error}") from error
        except RecursionError:
            raise invalid("chat", "the model's chat template nests too deeply on these messages") from None
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, MemoryError) as error:
            raise invalid("chat", f"the model's chat template failed on these messages: {error}") from error
        return "".join(parts)


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Ends this thread's Python code with BudgetExceeded after so much CPU time.

    Traces each line, because loops without output never hand control back and may nest through recursion and macros.
    """
    clock_end, cpu_end = time.perf_counter() + seconds, time.thread_time() + seconds

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        # The clock is cheap to read and never behind; CPU time decides, so that a busy machine fails no one.
        if time.perf_counter() > clock_end and time.thread_time() > cpu_end:
            raise BudgetExceeded(f"took more than {seconds:g} s")
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(outer)
