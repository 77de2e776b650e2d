"""Turns prompts into ids in threads, small ones apart from large ones, so that neither the event loop nor a short
prompt waits for a long one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quire.v1 import gateway_pb2
from services.gateway.tokenizer import ModelTokenizer

T = TypeVar("T")
LARGE_CHARACTERS = 64 * 1024

Prompt = str | Sequence[gateway_pb2.ChatMessage]


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
        messages = [to_dict(message) for message in prompt]
        size = sum(len(message["content"]) for message in messages)
        return await self._run(size, lambda: tokenizer.encode_chat(messages))

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


def to_dict(message: gateway_pb2.ChatMessage) -> dict[str, str]:
    """A message as templates see it; `name` only where there is one."""
    plain = {"role": message.role, "content": message.content}
    return plain | {"name": message.name} if message.name else plain
