"""Chat completions as OpenAI writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.gateway.events import Delta, Finished, Started
from services.gateway.http.errors import HttpError
from services.gateway.http.fanout import Answer, Choice, finish_reason
from services.gateway.http.logprobs import chat_logprobs, prompt_logprobs
from services.gateway.http.surface import Envelope, failure_event, stop_reason
from services.gateway.http.to_input import Job
from services.gateway.http.tools import call_deltas, content_of, whole_calls
from services.gateway.http.usage import render_usage
from services.gateway.output.parts import Part, reasoning_of


class ChatSurface:
    """One request to /v1/chat/completions."""

    def __init__(self, request_id: str, job: Job) -> None:
        self._id = f"chatcmpl-{request_id}"
        self._job = job
        self._envelope: Envelope
        self._started: Started

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        [answer] = answers
        body = {
            "id": self._id,
            "object": "chat.completion",
            "created": answer.started.created,
            "model": answer.started.model,
            "choices": [self._choice(answer.started, index, choice) for index, choice in enumerate(answer.choices)],
            "usage": render_usage([answer.finished]),
        }
        if answer.prompt_scores is not None:
            body["prompt_logprobs"] = prompt_logprobs(answer.prompt_scores)
        return body

    def opening(self, prompt: int, started: Started) -> bytes:
        """A chunk per choice that tells the speaker's role."""
        self._started = started
        self._envelope = Envelope("chat.completion.chunk", self._id, started, include_usage=self._job.include_usage)
        message = {"role": "assistant", "content": ""}
        return b"".join(
            self._envelope.chunk({"index": index, "delta": message, "logprobs": None, "finish_reason": None})
            for index in range(self._job.choices_per_prompt)
        )

    def delta(self, prompt: int, delta: Delta) -> bytes:
        reason = finish_reason(delta)
        message: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.parts:
            message |= self._parts(delta.choice, delta.parts)
        if not message and not delta.logprobs and reason is None:
            return b""
        choice = {
            "index": delta.choice,
            "delta": message,
            "logprobs": chat_logprobs(delta.logprobs) if delta.logprobs else None,
            "finish_reason": reason,
        }
        if reason is not None:
            choice["stop_reason"] = stop_reason(delta)
        return self._envelope.chunk(choice)

    def closing(self, finished: Sequence[Finished]) -> bytes:
        return self._envelope.end(finished)

    def failure(self, error: HttpError) -> bytes:
        return failure_event(error)

    def _parts(self, choice: int, parts: Sequence[Part]) -> dict[str, Any]:
        """What is new besides text."""
        message: dict[str, Any] = {}
        if self._job.show_reasoning and (reasoning := reasoning_of(parts)):
            message["reasoning_content"] = reasoning
        if calls := call_deltas(self._started, choice, parts):
            message["tool_calls"] = calls
        return message

    def _choice(self, started: Started, index: int, choice: Choice) -> dict[str, Any]:
        message = choice.message
        said: dict[str, Any] = {"role": "assistant", "content": content_of(message), "refusal": None}
        if message.reasoning and self._job.show_reasoning:
            said["reasoning_content"] = message.reasoning
        if message.calls:
            said["tool_calls"] = whole_calls(started, index, message)
        return {
            "index": index,
            "message": said,
            "logprobs": None if choice.logprobs is None else chat_logprobs(choice.logprobs),
            "finish_reason": finish_reason(choice.end),
            "stop_reason": stop_reason(choice.end),
        }
