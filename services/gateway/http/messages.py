"""Answers of /v1/messages as Anthropic writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from services.gateway.call_ids import call_id
from services.gateway.events import Delta, Finished, Started, parts_of
from services.gateway.http.blocks import Block, BlockCutter, Change, Kind, Step, blocks_of, event
from services.gateway.http.encoding import to_json
from services.gateway.http.errors import HttpError, anthropic_error
from services.gateway.http.fanout import Answer, finish_reason
from services.gateway.http.to_input import Job

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {
    Kind.TEXT: ("text_delta", "text"),
    Kind.REASONING: ("thinking_delta", "thinking"),
    Kind.CALL: ("input_json_delta", "partial_json"),
}


class MessagesSurface:
    """One request."""

    def __init__(self, request_id: str, job: Job) -> None:
        self._id, self._job = request_id, job
        self._cutter = BlockCutter(show_reasoning=job.show_reasoning)
        self._started: Started
        self._end: Delta | None = None

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        [answer] = answers
        [choice] = answer.choices
        self._started = answer.started
        blocks = blocks_of(choice.message, show_reasoning=self._job.show_reasoning)
        content = [self._block(block, whole=block.text) for block in blocks]
        return self._message(content, _usage(answer.finished)) | _ending(choice.end)

    def opening(self, prompt: int, started: Started) -> bytes:
        self._started = started
        usage = _usage(Finished(len(started.prompt_token_ids), 0, started.cached_tokens))
        return _event("message_start", message=self._message([], usage))

    def delta(self, prompt: int, delta: Delta) -> bytes:
        self._end = delta if delta.finish_reason is not None else None
        return b"".join(map(self._step, self._cutter.push(parts_of(delta))))

    def closing(self, finished: Sequence[Finished]) -> bytes:
        assert self._end is not None, "an end without a finish reason"
        last = b"".join(map(self._step, self._cutter.finish()))
        ending = _event("message_delta", delta=_ending(self._end), usage=_usage(finished[0]))
        return last + ending + _event("message_stop")

    def failure(self, error: HttpError) -> bytes:
        return event("error", to_json(anthropic_error(error, self._id)))

    def _step(self, step: Step) -> bytes:
        change, block, text = step
        match change:
            case Change.OPENED:
                return _event("content_block_start", index=block.index, content_block=self._block(block, whole=""))
            case Change.GREW:
                kind, name = _DELTAS[block.kind]
                return _event("content_block_delta", index=block.index, delta={"type": kind, name: text})
            case Change.CLOSED:
                return _event("content_block_stop", index=block.index)

    def _block(self, block: Block, whole: str) -> dict[str, Any]:
        match block.kind:
            case Kind.TEXT:
                return {"type": "text", "text": whole, "citations": None}
            case Kind.REASONING:
                return {"type": "thinking", "thinking": whole, "signature": ""}
            case Kind.CALL:
                assert block.call is not None
                name = call_id(self._started, 0, block.call.index, "toolu_")
                return {"type": "tool_use", "id": name, "name": block.call.name, "input": json.loads(whole or "{}")}

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._id}",
            "type": "message",
            "role": "assistant",
            "model": self._started.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }


def _event(name: str, /, **fields: Any) -> bytes:
    return event(name, to_json({"type": name, **fields}))


def _ending(end: Delta) -> dict[str, Any]:
    reason = finish_reason(end)
    by_stop = "end_turn" if end.matched_stop is None else "stop_sequence"
    return {"stop_reason": _REASONS.get(reason or "", by_stop), "stop_sequence": end.matched_stop}


def _usage(finished: Finished) -> dict[str, Any]:
    """Tokens of the prompt that were in the cache count apart."""
    return {
        "input_tokens": finished.prompt_tokens - finished.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": finished.cached_tokens,
        "output_tokens": finished.completion_tokens,
    }
