"""What differs between chat and text completions, and what the chunks of both have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from services.gateway.events import Delta, Started
from services.gateway.http.encoding import to_json
from services.gateway.http.fanout import Answer


class Surface(Protocol):
    """Renders one request's events. Choices are numbered prompt by prompt."""

    def whole(self, answers: Sequence[Answer], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer in one piece."""

    def opening(self, prompt: int, started: Started) -> bytes:
        """What is sent when a prompt was placed; may be empty."""

    def delta(self, prompt: int, delta: Delta) -> bytes:
        """What is sent for new tokens; empty where there is nothing to tell yet."""

    def closing(self, usage: dict[str, Any]) -> bytes:
        """The last chunk, with the usage and no choices."""


class Envelope:
    """The frame of every chunk: written once, as only the choice differs from chunk to chunk."""

    def __init__(self, kind: str, request_id: str, started: Started, *, include_usage: bool) -> None:
        head = {"id": request_id, "object": kind, "created": started.created, "model": started.model}
        self._head = f"data: {to_json(head)[:-1]},"
        self._choices = self._head + '"choices":['
        # Where a usage is to come, the chunks before it carry a null one.
        self._tail = "]" + (',"usage":null' if include_usage else "") + "}\n\n"

    def chunk(self, choice: dict[str, Any]) -> bytes:
        return f"{self._choices}{to_json(choice)}{self._tail}".encode("ascii")

    def usage(self, usage: dict[str, Any]) -> bytes:
        return f'{self._head}"choices":[],"usage":{to_json(usage)}}}\n\n'.encode("ascii")


def stop_reason(delta: Delta) -> str | int | None:
    """The stop string or token that ended the choice."""
    return delta.matched_stop if delta.matched_stop is not None else delta.matched_token_id
