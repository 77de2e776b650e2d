"""Chat completions as OpenAI writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.gateway.events import Delta, Started
from services.gateway.http.fanout import Answer, Choice, finish_reason
from services.gateway.http.logprobs import chat_logprobs, prompt_logprobs
from services.gateway.http.surface import Envelope, stop_reason
from services.gateway.http.to_input import Job


class ChatSurface:
    """One request to /v1/chat/completions."""

    def __init__(self, request_id: str, job: Job) -> None:
        self._id = f"chatcmpl-{request_id}"
        self._job = job
        self._envelope: Envelope

    def whole(self, answers: Sequence[Answer], usage: dict[str, Any]) -> dict[str, Any]:
        [answer] = answers
        body = {
            "id": self._id,
            "object": "chat.completion",
            "created": answer.started.created,
            "model": answer.started.model,
            "choices": [_choice(index, choice) for index, choice in enumerate(answer.choices)],
            "usage": usage,
        }
        if answer.prompt_scores is not None:
            body["prompt_logprobs"] = prompt_logprobs(answer.prompt_scores)
        return body

    def opening(self, prompt: int, started: Started) -> bytes:
        """A chunk per choice that tells the speaker's role."""
        self._envelope = Envelope("chat.completion.chunk", self._id, started, include_usage=self._job.include_usage)
        message = {"role": "assistant", "content": ""}
        return b"".join(
            self._envelope.chunk({"index": index, "delta": message, "logprobs": None, "finish_reason": None})
            for index in range(self._job.choices_per_prompt)
        )

    def delta(self, prompt: int, delta: Delta) -> bytes:
        reason = finish_reason(delta)
        if not delta.text and not delta.logprobs and reason is None:
            return b""
        choice = {
            "index": delta.choice,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": chat_logprobs(delta.logprobs) if delta.logprobs else None,
            "finish_reason": reason,
        }
        if reason is not None:
            choice["stop_reason"] = stop_reason(delta)
        return self._envelope.chunk(choice)

    def closing(self, usage: dict[str, Any]) -> bytes:
        return self._envelope.usage(usage)


def _choice(index: int, choice: Choice) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
        "logprobs": None if choice.logprobs is None else chat_logprobs(choice.logprobs),
        "finish_reason": finish_reason(choice.end),
        "stop_reason": stop_reason(choice.end),
    }
