"""Lean streaming clients: they note when messages come and how many tokens they bring, and little else."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import grpc
import httpx

from quire.bench.measures import Sample
from quire.client import bearer
from quire.v1 import gateway_pb2, gateway_pb2_grpc, types_pb2

CONNECT_SECONDS = 10.0
MESSAGE_BYTES = 200  # of a refusal in no known form


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt and how long its answer is to be."""

    prompt: str
    output_tokens: int
    due: float  # monotonic seconds


@dataclass(frozen=True, slots=True)
class Manner:
    """How all requests are asked, whatever the API."""

    model: str = ""  # empty: the server's only or first one
    timeout: float = 600.0  # seconds
    api_keys: tuple[str, ...] = ("",)  # of those who ask in turn; "" asks without
    priority: int | None = None
    target_first_token_ms: int | None = None
    target_token_gap_ms: int | None = None


class Client(Protocol):
    """Something that can be asked. Failures come back in the sample, never as exceptions."""

    async def ask(self, ask: Ask) -> Sample: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class GrpcClient:
    """Asks a Quire gateway over one channel."""

    def __init__(self, address: str, manner: Manner) -> None:
        self._address, self._manner = address, manner
        self._turns = itertools.cycle(enumerate(map(bearer, manner.api_keys)))

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self._address)
        self._stub: Any = gateway_pb2_grpc.InferenceServiceStub(self._channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def ask(self, ask: Ask) -> Sample:
        manner = self._manner
        caller, metadata = next(self._turns)
        sample = Sample(ask.due, caller=caller)
        request = gateway_pb2.GenerateStreamRequest(
            input=gateway_pb2.GenerationInput(
                model=manner.model,
                text=ask.prompt,
                sampling=types_pb2.SamplingParams(temperature=0),
                stop=types_pb2.StopCriteria(max_tokens=ask.output_tokens, ignore_eos=True),
                priority=manner.priority or 0,
                target_first_token_ms=manner.target_first_token_ms or 0,
                target_token_gap_ms=manner.target_token_gap_ms or 0,
            )
        )
        try:
            async for message in self._stub.GenerateStream(request, timeout=manner.timeout, metadata=metadata):
                if message.token_ids:
                    sample.arrivals.append(time.monotonic())
                    sample.token_counts.append(len(message.token_ids))
                if message.HasField("usage"):
                    sample.prompt_tokens = message.usage.prompt_tokens
        except grpc.aio.AioRpcError as error:
            sample.error, sample.error_message = error.code().name, error.details() or ""
        sample.end = time.monotonic()
        sample.output_tokens = sum(sample.token_counts)
        if sample.error is None and not sample.output_tokens:
            sample.error = "EMPTY_ANSWER"
        return sample


class OpenAIClient:
    """Asks any server that speaks OpenAI's completions API."""

    def __init__(self, base_url: str, manner: Manner, connections: int) -> None:
        self._base_url, self._model, self._priority = base_url.rstrip("/"), manner.model, manner.priority
        self._timeout = httpx.Timeout(manner.timeout, connect=CONNECT_SECONDS)
        # Plain bytes, because they are read as they come.
        self._headers = {"Accept-Encoding": "identity"} | _target_headers(manner)
        self._turns = itertools.cycle(enumerate(dict(bearer(key)) for key in manner.api_keys))
        # One connection per request, whatever the server: some close theirs after a stream.
        self._limits = httpx.Limits(max_connections=connections, max_keepalive_connections=0)

    async def __aenter__(self) -> Self:
        self._http = httpx.AsyncClient(timeout=self._timeout, headers=self._headers, limits=self._limits)
        try:
            self._model = self._model or await self._only_model()
        except BaseException:
            await self._http.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def _only_model(self) -> str:
        answer = await self._http.get(f"{self._base_url}/models", headers=next(self._turns)[1])
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])

    async def ask(self, ask: Ask) -> Sample:
        caller, key = next(self._turns)
        sample = Sample(ask.due, caller=caller)
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": ask.prompt,
            "max_tokens": ask.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._priority is not None:
            body["priority"] = self._priority
        url = f"{self._base_url}/completions"
        try:
            async with self._http.stream("POST", url, json=body, headers=key) as answer:
                if answer.status_code != httpx.codes.OK:
                    sample.error = f"HTTP_{answer.status_code}"
                    sample.error_message = _message(await answer.aread())
                else:
                    await _read_events(answer, sample)
        except (httpx.HTTPError, ValueError) as error:
            sample.error, sample.error_message = type(error).__name__, str(error)
        sample.end = time.monotonic()
        # A server that reports no usage is taken to send a token a message.
        sample.output_tokens = sample.output_tokens or len(sample.arrivals)
        if sample.error is None and not sample.output_tokens:
            sample.error = "EMPTY_ANSWER"
        return sample


def _message(body: bytes) -> str:
    """What a refusal says, in the form of OpenAI's API or any other."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:MESSAGE_BYTES].decode(errors="replace")


def _target_headers(manner: Manner) -> dict[str, str]:
    targets = {"x-slo-ttft-ms": manner.target_first_token_ms, "x-slo-tpot-ms": manner.target_token_gap_ms}
    return {name: str(value) for name, value in targets.items() if value is not None}


async def _read_events(answer: httpx.Response, sample: Sample) -> None:
    """Notes each event with text. Parses JSON only where there may be something to learn."""
    async for event in server_sent_events(answer.aiter_raw()):
        if event == b"[DONE]":
            return
        if b'"usage":' not in event and b'"error"' not in event and b'"text":""' not in event:
            sample.arrivals.append(time.monotonic())
            continue
        content = json.loads(event)
        if content.get("error"):
            sample.error = str(content["error"].get("code") or content["error"].get("type") or "ERROR")
            sample.error_message = str(content["error"].get("message") or "")
            return
        if usage := content.get("usage"):
            sample.output_tokens, sample.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
        if any(choice.get("text") for choice in content.get("choices", ())):
            sample.arrivals.append(time.monotonic())
    sample.error = "CUT_STREAM"


async def server_sent_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Data of the events in a byte stream, however it is cut into chunks."""
    held = b""
    async for chunk in chunks:
        *lines, held = (held + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
