"""Turns prompts into ids in threads, small ones apart from large ones, so that neither the event loop nor a short
prompt waits for a long one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from quire.v1 import gateway_pb2
from services.gateway.tokenizer import ModelTokenizer

T = TypeVar("T")
LARGE_CHARACTERS = 64 * 1024

Prompt = str | gateway_pb2.Chat


class Encoder:
    """Owns the threads."""

    def __init__(self, threads: int) -> None:
        self._small = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="encode-large")

    async def encode(self, tokenizer: ModelTokenizer, prompt: Prompt, *, add_bos: bool = True) -> list[int]:
        """Ids of a text, or of a chat rendered by the model's template."""
        if isinstance(prompt, str):
            text = prompt
            return await self._run(len(text), lambda: tokenizer.encode(text, add_bos=add_bos))
        chat = prompt
        thinking = chat.thinking if chat.HasField("thinking") else None

        def encode() -> list[int]:
            return tokenizer.encode_chat([to_dict(message) for message in chat.messages], shown_tools(chat), thinking)

        size = sum(map(_size_of, chat.messages)) + sum(len(tool.parameters) for tool in chat.tools)
        return await self._run(size, encode)

    async def decode(self, tokenizer: ModelTokenizer, ids: Sequence[int], *, skip_special: bool) -> str:
        """The text of ids."""
        return await self._run(len(ids), lambda: tokenizer.decode(ids, skip_special=skip_special))

    async def run_large(self, work: Callable[[], T]) -> T:
        """Runs long work beside the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._large, work)

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        if size > LARGE_CHARACTERS:
            return await self.run_large(work)
        return await asyncio.get_running_loop().run_in_executor(self._small, work)

    def stop(self) -> None:
        self._small.shutdown(wait=False, cancel_futures=True)
        self._large.shutdown(wait=False, cancel_futures=True)


def to_dict(message: gateway_pb2.ChatMessage) -> dict[str, Any]:
    """A valid message as templates see it; only role and content where there is nothing else."""
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        plain["name"] = message.name
    if message.reasoning_content:
        plain["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        plain["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def shown_tools(chat: gateway_pb2.Chat) -> list[dict[str, Any]]:
    """The tools of a valid chat as templates see them: none where none may be called."""
    if chat.tool_mode == gateway_pb2.TOOL_MODE_NONE:
        return []
    return [_tool(tool) for tool in chat.tools]


def _size_of(message: gateway_pb2.ChatMessage) -> int:
    return (
        len(message.content) + len(message.reasoning_content) + sum(len(call.arguments) for call in message.tool_calls)
    )


def _call(call: gateway_pb2.ToolCall) -> dict[str, Any]:
    # Templates write the arguments themselves.
    function = {"name": call.name, "arguments": json.loads(call.arguments or "{}")}
    return {"id": call.id, "type": "function", "function": function}


def _tool(tool: gateway_pb2.Tool) -> dict[str, Any]:
    parameters = json.loads(tool.parameters) if tool.parameters else {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}
