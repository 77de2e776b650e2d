"""Text completions as OpenAI writes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from services.gateway.events import Delta, Finished, Started
from services.gateway.http.errors import HttpError
from services.gateway.http.fanout import Answer, Choice, finish_reason
from services.gateway.http.logprobs import CompletionLogprobs, prompt_logprobs
from services.gateway.http.surface import Envelope, failure_event, stop_reason
from services.gateway.http.to_input import Job
from services.gateway.http.usage import render_usage


class CompletionSurface:
    """One request to /v1/completions."""

    def __init__(self, request_id: str, job: Job) -> None:
        self._id = f"cmpl-{request_id}"
        self._job = job
        self._envelope: Envelope | None = None
        self._logprobs: defaultdict[int, CompletionLogprobs] = defaultdict(CompletionLogprobs)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        per_prompt = self._job.choices_per_prompt
        choices = [
            _choice(prompt * per_prompt + index, choice, answer)
            for prompt, answer in enumerate(answers)
            for index, choice in enumerate(answer.choices)
        ]
        started = answers[0].started
        return {
            "id": self._id,
            "object": "text_completion",
            "created": started.created,
            "model": started.model,
            "choices": choices,
            "usage": render_usage(answer.finished for answer in answers),
        }

    def opening(self, prompt: int, started: Started) -> bytes:
        """Nothing is sent, but the first prompt's start gives every chunk its frame."""
        if self._envelope is None:
            self._envelope = Envelope("text_completion", self._id, started, include_usage=self._job.include_usage)
        return b""

    def delta(self, prompt: int, delta: Delta) -> bytes:
        assert self._envelope is not None, "a delta before its start"
        reason = finish_reason(delta)
        if not delta.text and not delta.logprobs and reason is None:
            return b""
        index = prompt * self._job.choices_per_prompt + delta.choice
        choice = {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs[index].render(delta.logprobs) if delta.logprobs else None,
            "finish_reason": reason,
        }
        if reason is not None:
            choice["stop_reason"] = stop_reason(delta)
        return self._envelope.chunk(choice)

    def closing(self, finished: Sequence[Finished]) -> bytes:
        assert self._envelope is not None, "an end before its start"
        return self._envelope.end(finished)

    def failure(self, error: HttpError) -> bytes:
        return failure_event(error)


def _choice(index: int, choice: Choice, answer: Answer) -> dict[str, Any]:
    body = {
        "index": index,
        "text": choice.message.text,
        "logprobs": None if choice.logprobs is None else CompletionLogprobs().render(choice.logprobs),
        "finish_reason": finish_reason(choice.end),
        "stop_reason": stop_reason(choice.end),
    }
    if answer.prompt_scores is not None:
        body["prompt_logprobs"] = prompt_logprobs(answer.prompt_scores)
    return body
