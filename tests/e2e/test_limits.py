"""Edges of prompts, lengths, messages, time and patience: refused by name or served, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from quire.v1 import gateway_pb2, gateway_pb2_grpc, types_pb2
from services.common.rpc import MAX_MESSAGE_BYTES, OPTIONS
from tests.e2e.requests import Ids, all_blocks_back, channel, collect, greedy, ids_of, leased_blocks
from tests.e2e.stack import Stack
from tests.fixtures.models import make_rand_model, make_succ_model
from tests.fixtures.vocabularies import FIRST_EXTRA_ID, byte_level

CONTEXT = 256
LENGTH = types_pb2.FINISH_REASON_LENGTH
MAX_PROMPT_BYTES = 6 << 20
LONG_ID, LONG_PIECE = FIRST_EXTRA_ID, "x" * 4096  # soon fills what lies between the gateway and a reader
PROBE = greedy([5, 6, 7], 12)
INVALID, EXHAUSTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rand_model(tmp_path_factory.mktemp("rand"), seed=41, context_length=CONTEXT)


@pytest.fixture(scope="module")
def stack(model: Path) -> Iterator[Stack]:
    with Stack(model, kv_blocks=64) as running:
        yield running


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A long context, text that shrinks a thousandfold on its way to ids, and little patience with readers."""
    words = byte_level([LONG_PIECE])
    words.tokenizer["normalizer"] = {"type": "Replace", "pattern": {"Regex": "a{1024}"}, "content": "a"}
    path = make_succ_model(
        tmp_path_factory.mktemp("succ"), {ord("a"): ord("a"), LONG_ID: LONG_ID}, vocabulary=words, context_length=32768
    )
    patience: dict[str, object] = {"hold_tokens": 64, "slow_reader_seconds": 2, "max_prompt_bytes": MAX_PROMPT_BYTES}
    with Stack(path, kv_blocks=4096, gateway=patience) as running:
        yield running


async def refusal(
    stub: gateway_pb2_grpc.InferenceServiceAsyncStub, request: gateway_pb2.GenerationInput
) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(gateway_pb2.GenerateRequest(input=request), timeout=20)
    return caught.value


@contextlib.contextmanager
def frozen(stack: Stack, name: str) -> Iterator[None]:
    stack.freeze(name)
    try:
        yield
    finally:
        stack.thaw(name)


async def test_empty_prompts(stack: Stack) -> None:
    """Case C1: a model with a beginning token generates from it; no ids and no messages are refused."""
    before = await ids_of(stack.gateway, [PROBE])
    async with channel(stack.gateway) as wire:
        stub = gateway_pb2_grpc.InferenceServiceStub(wire)
        [answer] = await collect(stub, greedy("", 3))
        assert len(answer.ids) == 3
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 1
        silent = gateway_pb2.GenerationInput(chat={"messages": [{"role": "user", "content": ""}]})
        silent.stop.max_tokens = 2
        assert len((await collect(stub, silent))[0].ids) <= 2
        for fields in ({}, {"token_ids": {"ids": []}}, {"chat": {"messages": []}}):
            assert (await refusal(stub, gateway_pb2.GenerationInput(**fields))).code() == INVALID
    async with httpx.AsyncClient(base_url=stack.http, timeout=60) as http:

        async def ask(path: str, **body: Any) -> httpx.Response:
            return await http.post(f"/v1/{path}", json={"model": "tiny", "max_tokens": 3, "ignore_eos": True, **body})

        for prompt in ("", [""]):
            answered = await ask("completions", prompt=prompt)
            assert answered.status_code == 200
            assert answered.json()["usage"]["prompt_tokens"] == 1
        for prompt in ([], [[]]):
            assert (await ask("completions", prompt=prompt)).status_code == 400
        assert (await ask("chat/completions", messages=[])).status_code == 400
        spoken = await ask("chat/completions", messages=[{"role": "user", "content": ""}])
        assert spoken.status_code == 200
    assert await ids_of(stack.gateway, [PROBE]) == before


async def test_the_edge_of_the_context(stack: Stack) -> None:
    """Case C2: the documented table, by gRPC and HTTP, and never a hang."""
    before = await ids_of(stack.gateway, [PROBE])
    left = {CONTEXT - 2: 2, CONTEXT - 1: 1}
    async with channel(stack.gateway) as wire, httpx.AsyncClient(base_url=stack.http, timeout=60) as http:
        stub = gateway_pb2_grpc.InferenceServiceStub(wire)
        for length in range(CONTEXT - 2, CONTEXT + 2):
            for budget in (None, 0, 1, 2):
                prompt = [9] * length
                request = greedy(prompt, 1)
                request.stop.ClearField("max_tokens")
                body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "ignore_eos": True}
                if budget is not None:
                    request.stop.max_tokens = body["max_tokens"] = budget
                fits = length in left and (budget is None or 1 <= budget <= left[length])
                answered = await http.post("/v1/completions", json=body)
                if not fits:
                    assert (await refusal(stub, request)).code() == INVALID, (length, budget)
                    assert answered.status_code == 400
                    continue
                whole = await stub.Generate(gateway_pb2.GenerateRequest(input=request), timeout=20)
                wanted = budget or left[length]
                assert [len(choice.token_ids) for choice in whole.choices] == [wanted]
                assert whole.choices[0].finish_reason == LENGTH
                assert answered.json()["usage"]["completion_tokens"] == wanted
                assert answered.json()["choices"][0]["finish_reason"] == "length"
    assert await ids_of(stack.gateway, [PROBE]) == before


async def test_a_deadline_ends_a_stream_and_frees_its_blocks(stack: Stack) -> None:
    """A deadline in the middle of a stream; one that passes in the queue; others go on."""
    before = await ids_of(stack.gateway, [PROBE])
    async with channel(stack.gateway) as wire:
        stub = gateway_pb2_grpc.InferenceServiceStub(wire)

        def begin(request: gateway_pb2.GenerationInput, seconds: float) -> Any:
            return stub.GenerateStream(gateway_pb2.GenerateStreamRequest(input=request), timeout=seconds)

        async def tokens_until_late(call: Any) -> int:
            seen = 0
            with contextlib.suppress(grpc.aio.AioRpcError):
                while (message := await call.read()) is not grpc.aio.EOF:
                    seen += len(message.token_ids)
            assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            return seen

        with frozen(stack, "executor"):
            late = [tokens_until_late(begin(greedy([n] * 40, 150), 1.0)) for n in range(3)]
            assert await asyncio.gather(*late) == [0, 0, 0]
        await all_blocks_back(stack.gateway)
        # However fast the engine is, the deadline passes in the middle: it stands still after the first tokens.
        call = begin(greedy([1], 200, choice_count=32), 3.0)
        first = await call.read()
        with frozen(stack, "executor"):
            assert 0 < len(first.token_ids) + await tokens_until_late(call) < 32 * 200
    await all_blocks_back(stack.gateway)
    assert await ids_of(stack.gateway, [PROBE]) == before


async def test_cancels_towards_a_frozen_executor(stack: Stack) -> None:
    """Case D2: blocks stay held while a write may still land, and come back when it cannot; a hundred times."""
    before = await ids_of(stack.gateway, [PROBE])
    async with channel(stack.gateway) as wire:
        stub = gateway_pb2_grpc.InferenceServiceStub(wire)

        def begin(n: int, length: int) -> Any:
            return stub.GenerateStream(gateway_pb2.GenerateStreamRequest(input=greedy([n] * length, 100)))

        for _ in range(4):
            calls = [begin(n, 20) for n in range(5)]
            await asyncio.gather(*(call.read() for call in calls))
            with frozen(stack, "executor"):
                calls += [begin(50 + n, 150) for n in range(20)]
                await asyncio.sleep(0.2)
                for call in calls:
                    call.cancel()
                await asyncio.sleep(0.3)
                assert await leased_blocks(stack.gateway) > 0, "blocks were handed on under a running step"
            await all_blocks_back(stack.gateway)
            assert await ids_of(stack.gateway, [PROBE]) == before


async def test_large_prompts_and_answers(roomy: Stack) -> None:
    """Case L1: 5 MiB of text in, more than 4 MiB out, on every hop; over the limit it is named."""
    text = "a" * (5 << 20)
    async with channel(roomy.gateway) as wire, httpx.AsyncClient(base_url=roomy.http, timeout=60) as http:
        stub = gateway_pb2_grpc.InferenceServiceStub(wire)
        request = greedy(text, 2)
        whole = await stub.Generate(gateway_pb2.GenerateRequest(input=request))
        assert whole.usage.prompt_tokens == 1 + (5 << 10)
        assert whole.choices[0].text == "aa"
        body = {"model": "tiny", "prompt": text, "max_tokens": 2, "temperature": 0}
        answered = await http.post("/v1/completions", json=body)
        assert answered.json()["usage"]["prompt_tokens"] == 1 + (5 << 10)

        scored = greedy([ord("a")] * 12_000, 1)
        scored.logprobs.prompt_count = 20
        whole = await stub.Generate(gateway_pb2.GenerateRequest(input=scored))
        assert whole.ByteSize() > 4 << 20
        assert all(len(token.top) == 20 for token in whole.prompt_logprobs[1:])
        body = {"model": "tiny", "prompt": [ord("a")] * 12_000, "max_tokens": 1, "prompt_logprobs": 20}
        answered = await http.post("/v1/completions", json=body)
        assert len(answered.content) > 4 << 20
        assert len(answered.json()["choices"][0]["prompt_logprobs"]) == 12_000

        over = "a" * (MAX_PROMPT_BYTES + 1)
        refused = await refusal(stub, gateway_pb2.GenerationInput(text=over))
        assert refused.code() == EXHAUSTED
        assert str(MAX_PROMPT_BYTES) in (refused.details() or "")
        answered = await http.post("/v1/completions", json={"model": "tiny", "prompt": over})
        assert answered.status_code == 413
        assert str(MAX_PROMPT_BYTES) in answered.json()["error"]["message"]
        answered = await http.post(
            "/v1/completions", content=b" " * ((16 << 20) + 1), headers={"content-type": "application/json"}
        )
        assert answered.status_code == 413
        assert str(16 << 20) in answered.json()["error"]["message"]
    unlimited = [(name, -1 if name == "grpc.max_send_message_length" else value) for name, value in OPTIONS]
    async with grpc.aio.insecure_channel(roomy.gateway, options=unlimited) as wire:
        stub = gateway_pb2_grpc.InferenceServiceStub(wire)
        refused = await refusal(stub, gateway_pb2.GenerationInput(text="a" * MAX_MESSAGE_BYTES))
        assert refused.code() == EXHAUSTED
        assert str(MAX_MESSAGE_BYTES) in (refused.details() or "")
        assert (await collect(stub, greedy("a", 2)))[0].text == "aa"


async def test_a_slow_reader_gets_everything(roomy: Stack) -> None:
    """Case L4: held again and again, never cut, as long as it reads; a quick one beside it does not wait."""

    async def read(pause: float) -> list[int]:
        request = greedy([ord("a")], 1200, choice_count=2)
        counts, messages = [0, 0], 0
        async with channel(roomy.gateway) as wire:
            stub = gateway_pb2_grpc.InferenceServiceStub(wire)
            async for message in stub.GenerateStream(gateway_pb2.GenerateStreamRequest(input=request)):
                counts[message.choice] += len(message.token_ids)
                messages += 1
                if messages % 40 == 0:
                    await asyncio.sleep(pause)
        return counts

    assert await asyncio.gather(read(0.4), read(0)) == [[1200, 1200]] * 2
    await all_blocks_back(roomy.gateway)


@pytest.mark.parametrize("surface", ["grpc", "http"])
async def test_readers_that_stop_are_cut(roomy: Stack, surface: str) -> None:
    """Case L4: 50 streams read once and stop; memory stays flat, others are served, blocks come back."""
    probe = greedy([ord("a")], 20)
    gateway = psutil.Process(roomy.pid("gateway"))
    before = await ids_of(roomy.gateway, [probe])
    async with contextlib.AsyncExitStack() as open_streams:
        begin = open_grpc if surface == "grpc" else open_http
        readers = await asyncio.gather(*(begin(roomy, open_streams, [LONG_ID] * (n + 1)) for n in range(50)))
        begun, resident = time.monotonic(), gateway.memory_info().rss
        assert await leased_blocks(roomy.gateway) > 0
        while time.monotonic() - begun < 3:
            assert await ids_of(roomy.gateway, [probe]) == before
        await all_blocks_back(roomy.gateway)  # while their connections stay open
        assert gateway.memory_info().rss - resident < 60 << 20
        assert await ids_of(roomy.gateway, [probe]) == before
        await asyncio.sleep(2.5)  # until the gateway waits no longer for them to come back
        for read_on in readers[:3]:
            await read_on()


async def open_grpc(
    stack: Stack, open_streams: contextlib.AsyncExitStack, prompt: Ids
) -> Callable[[], Awaitable[None]]:
    """A stream that has read once; the result reads on and checks that it ends with an error."""
    # A window that does not grow, as it would for a reader of tens of megabytes.
    window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
    wire = await open_streams.enter_async_context(grpc.aio.insecure_channel(stack.gateway, options=OPTIONS + window))
    request = greedy(prompt, 30_000)
    stub = gateway_pb2_grpc.InferenceServiceStub(wire)
    call = stub.GenerateStream(gateway_pb2.GenerateStreamRequest(input=request))
    open_streams.callback(call.cancel)
    assert (await call.read()).token_ids

    async def read_on() -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        assert await call.code() == EXHAUSTED

    return read_on


async def open_http(
    stack: Stack, open_streams: contextlib.AsyncExitStack, prompt: Ids
) -> Callable[[], Awaitable[None]]:
    """As `open_grpc`, for server-sent events; the connection breaks off."""
    window = httpx.AsyncHTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)])
    http = await open_streams.enter_async_context(httpx.AsyncClient(transport=window, base_url=stack.http, timeout=60))
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 30_000, "stream": True, "temperature": 0}
    answer = await open_streams.enter_async_context(http.stream("POST", "/v1/completions", json=body))
    source = answer.aiter_raw()
    assert await anext(source)

    async def read_on() -> None:
        rest = bytearray()
        with contextlib.suppress(httpx.TransportError):
            async for data in source:
                rest += data
        assert b"[DONE]" not in rest

    return read_on
