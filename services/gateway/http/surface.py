"""What differs between chat and text completions, and what the chunks of both have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from services.gateway.events import Delta, Finished, Started
from services.gateway.http.encoding import to_json
from services.gateway.http.errors import HttpError
from services.gateway.http.fanout import Answer
from services.gateway.http.usage import render_usage

DONE = b"data: [DONE]\n\n"


class Surface(Protocol):
    """Renders one request's events. Choices are numbered prompt by prompt."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The answer in one piece."""

    def opening(self, prompt: int, started: Started) -> bytes:
        """What is sent when a prompt was placed; may be empty."""

    def delta(self, prompt: int, delta: Delta) -> bytes:
        """What is sent for new tokens; empty where there is nothing to tell yet."""

    def closing(self, finished: Sequence[Finished]) -> bytes:
        """What is sent in the end."""

    def failure(self, error: HttpError) -> bytes:
        """What is sent instead of an end."""


class Envelope:
    """The frame of every chunk: written once, as only the choice differs from chunk to chunk."""

    def __init__(self, kind: str, request_id: str, started: Started, *, include_usage: bool) -> None:
        self._include_usage = include_usage
        head = {"id": request_id, "object": kind, "created": started.created, "model": started.model}
        self._head = f"data: {to_json(head)[:-1]},"
        self._choices = self._head + '"choices":['
        # Where a usage is to come, the chunks before it carry a null one.
        self._tail = "]" + (',"usage":null' if include_usage else "") + "}\n\n"

    def chunk(self, choice: dict[str, Any]) -> bytes:
        return f"{self._choices}{to_json(choice)}{self._tail}".encode("ascii")

    def end(self, finished: Sequence[Finished]) -> bytes:
        """The usage, where that is to come, with no choices; then the end marker."""
        if not self._include_usage:
            return DONE
        usage = to_json(render_usage(finished))
        return f'{self._head}"choices":[],"usage":{usage}}}\n\n'.encode("ascii") + DONE


def failure_event(error: HttpError) -> bytes:
    """OpenAI's shape of a failure in mid-stream; no end marker follows it."""
    return f"data: {to_json(error.body())}\n\n".encode("ascii")


def stop_reason(delta: Delta) -> str | int | None:
    """The stop string or token that ended the choice."""
    return delta.matched_stop if delta.matched_stop is not None else delta.matched_token_id
