"""Answers of /v1/responses as OpenAI writes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from services.gateway.call_ids import call_id
from services.gateway.events import Delta, Finished, Started, parts_of
from services.gateway.http.blocks import Block, BlockCutter, Change, Kind, Step, blocks_of, event
from services.gateway.http.encoding import to_json
from services.gateway.http.errors import HttpError
from services.gateway.http.fanout import Answer, finish_reason
from services.gateway.http.responses_body import ResponsesRequest

_PREFIXES = {Kind.REASONING: "rs_", Kind.TEXT: "msg_", Kind.CALL: "fc_"}
_EVENTS = {Kind.REASONING: "reasoning_text", Kind.TEXT: "output_text", Kind.CALL: "function_call_arguments"}


class ResponsesSurface:
    """One request."""

    def __init__(self, request_id: str, body: ResponsesRequest) -> None:
        self._id, self._body = f"resp_{request_id}", body
        self._cutter = BlockCutter(show_reasoning=True)
        self._started: Started
        self._end: Delta | None = None
        self._number = 0  # of the next event

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        [answer] = answers
        [choice] = answer.choices
        self._started, self._end = answer.started, choice.end
        blocks = blocks_of(choice.message, show_reasoning=True)
        return self._response(self._status(), map(self._item, blocks), answer.finished)

    def opening(self, prompt: int, started: Started) -> bytes:
        self._started = started
        begun = self._response("in_progress", ())
        return b"".join(self._event(f"response.{name}", response=begun) for name in ("created", "in_progress"))

    def delta(self, prompt: int, delta: Delta) -> bytes:
        self._end = delta if delta.finish_reason is not None else None
        return b"".join(map(self._step, self._cutter.push(parts_of(delta))))

    def closing(self, finished: Sequence[Finished]) -> bytes:
        last = b"".join(map(self._step, self._cutter.finish()))
        status = self._status()
        response = self._response(status, map(self._item, self._cutter.blocks), finished[0])
        return last + self._event(f"response.{status}", response=response)

    def failure(self, error: HttpError) -> bytes:
        response = self._response("failed", map(self._item, self._cutter.blocks))
        response["error"] = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=response)

    def _status(self) -> str:
        assert self._end is not None, "an end without a finish reason"
        return "incomplete" if finish_reason(self._end) == "length" else "completed"

    def _event(self, name: str, /, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event(name, to_json({"type": name, "sequence_number": number, **fields}))

    def _step(self, step: Step) -> bytes:
        change, block, text = step
        kind, name = block.kind, f"response.{_EVENTS[block.kind]}"
        place: dict[str, Any] = {"item_id": self._name(block), "output_index": block.index}
        if kind is not Kind.CALL:
            place["content_index"] = 0
        more: dict[str, Any] = {"logprobs": []} if kind is Kind.TEXT else {}
        match change:
            case Change.OPENED:
                item = self._item(block) | {"status": "in_progress"}
                if kind is not Kind.CALL:
                    item["content"] = []
                added = self._event("response.output_item.added", output_index=block.index, item=item)
                if kind is Kind.CALL:
                    return added
                return added + self._event("response.content_part.added", **place, part=_part(block))
            case Change.GREW:
                return self._event(f"{name}.delta", **place, delta=text, **more)
            case Change.CLOSED:
                if kind is Kind.CALL:
                    assert block.call is not None
                    last = self._event(f"{name}.done", **place, name=block.call.name, arguments=block.text)
                else:
                    last = self._event(f"{name}.done", **place, text=block.text, **more)
                    last += self._event("response.content_part.done", **place, part=_part(block))
                done = self._event("response.output_item.done", output_index=block.index, item=self._item(block))
                return last + done

    def _name(self, block: Block) -> str:
        return call_id(self._started, 0, block.index, _PREFIXES[block.kind])

    def _item(self, block: Block) -> dict[str, Any]:
        status = "incomplete" if block.faulty else "completed"
        head = {"id": self._name(block), "status": status}
        match block.kind:
            case Kind.REASONING:
                return head | {"type": "reasoning", "summary": [], "content": [_part(block)]}
            case Kind.TEXT:
                return head | {"type": "message", "role": "assistant", "content": [_part(block)]}
            case Kind.CALL:
                assert block.call is not None
                name = call_id(self._started, 0, block.call.index)
                written = {"call_id": name, "name": block.call.name, "arguments": block.text}
                return head | {"type": "function_call"} | written

    def _response(
        self, status: str, output: Iterable[dict[str, Any]], finished: Finished | None = None
    ) -> dict[str, Any]:
        body = self._body
        said = body.model_dump(by_alias=True, exclude_none=True, include={"tools", "tool_choice", "metadata"})
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text is not None else {}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._started.created,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": said.get("metadata", {}),
            "model": self._started.model,
            "output": list(output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}} | text,
            "tool_choice": said.get("tool_choice", "auto"),
            "tools": said.get("tools", []),
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if finished is None else _usage(finished),
            "user": body.user,
        }


def _part(block: Block) -> dict[str, Any]:
    if block.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _usage(finished: Finished) -> dict[str, Any]:
    return {
        "input_tokens": finished.prompt_tokens,
        "input_tokens_details": {"cached_tokens": finished.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": finished.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": finished.reasoning_tokens or 0},
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
    }
