"""Disconnects, odd clients, and start and stop of a real server."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import httpx
import pytest

from services.gateway.http.server import HttpServer, serve_http
from services.gateway.identity import Identity
from tests.unit.gateway_http.fake_engine import FakeEngine, Settings


def request(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    return post_head(len(content)) + content


def post_head(length: int) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {length}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def connect(server: HttpServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = server.address.rsplit(":", 1)
    return await asyncio.open_connection(host, int(port))


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of an answer with a length."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    return int(head.split(b" ")[1]), await reader.readexactly(length)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hi", ["hi", "ho"]])
@pytest.mark.parametrize("after", [0, 2])
async def test_a_client_that_leaves_ends_its_request(
    server: HttpServer, engine: FakeEngine, stream: bool, prompt: Any, after: int
) -> None:
    """D: at once, streamed or not, though nothing is being sent at that moment."""
    engine.hang_after = after
    _, writer = await connect(server)
    writer.write(request({"prompt": prompt, "stream": stream}))
    await asyncio.wait_for(engine.hung.wait(), 5)
    assert engine.running > 0
    left = time.monotonic()
    writer.close()
    await asyncio.wait_for(engine.ended.wait(), 5)
    assert time.monotonic() - left < 0.2


async def test_a_client_that_leaves_while_sending_starts_nothing(server: HttpServer, engine: FakeEngine) -> None:
    _, writer = await connect(server)
    writer.write(request({"prompt": "hi"})[:-3])
    await asyncio.sleep(0.05)
    writer.close()
    await asyncio.sleep(0.05)
    assert not engine.requests


async def test_an_engine_that_gives_a_reader_up_closes_its_connection(server: HttpServer, engine: FakeEngine) -> None:
    """L4: the engine cuts a client that stopped reading; its handler ends with it."""
    cuts = []
    generate = engine.generate

    def capture(*args: Any, **kwargs: Any) -> Any:
        cuts.append(kwargs["on_cut"])
        return generate(*args, **kwargs)

    engine.generate, engine.hang_after = capture, 2  # type: ignore[method-assign]
    reader, writer = await connect(server)
    writer.write(request({"prompt": "hi", "stream": True}))
    await asyncio.wait_for(engine.hung.wait(), 5)
    cuts[0]()
    await asyncio.wait_for(engine.ended.wait(), 5)
    rest = await asyncio.wait_for(reader.read(), 5)
    assert b"[DONE]" not in rest
    assert not rest.endswith(b"0\r\n\r\n")
    writer.close()


async def test_a_slow_reader_holds_the_engine_back(server: HttpServer, engine: FakeEngine) -> None:
    """L4: unread text stays in the engine's hands, not in the server's memory."""
    engine.pieces = ["x" * 100_000] * 60
    reader, writer = await connect(server)
    writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    writer.write(request({"prompt": "hi", "stream": True, "max_tokens": 60}))
    await reader.readuntil(b"data: ")
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    await asyncio.sleep(0.3)
    assert engine.running == 1
    writer.transport.abort()
    await asyncio.wait_for(engine.ended.wait(), 5)


async def test_headers_are_bounded(server: HttpServer, engine: FakeEngine) -> None:
    """S5: 10 MB of headers are refused after 64 KiB, one long or many short."""
    for lines in (b"x-long: " + b"a" * (10 << 20), b"x-many: a\r\n" * (1 << 20)):
        reader, writer = await connect(server)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n" + lines)
        assert b" 431 " in await asyncio.wait_for(reader.readline(), 5)
        writer.close()
    async with httpx.AsyncClient(base_url=f"http://{server.address}") as client:
        long = {"x-long": "a" * 60_000}
        assert (await client.get("/health", headers=long)).status_code == 200
        assert (await client.get("/health", headers=long)).status_code == 200


async def test_a_connection_serves_on_after_a_refused_body(server: HttpServer) -> None:
    """S5: what follows a refused body is read as the next request, never as a part of it or the other way round."""
    reader, writer = await connect(server)
    size = (16 << 20) + 1
    writer.write(post_head(size))
    assert (await asyncio.wait_for(read_answer(reader), 5))[0] == 413
    writer.write((b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * (size // 30))[:size])
    writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
    status, body = await asyncio.wait_for(read_answer(reader), 5)
    assert (status, json.loads(body)["object"]) == (200, "list")
    writer.close()


async def test_probes_are_answered_while_large_bodies_are_read(server: HttpServer) -> None:
    """K2: large text, many ids and many biases beside a probe every 20 ms."""
    bodies = [
        {"prompt": "x" * (15 << 20)},
        {"prompt": [7] * (1 << 20)},
        {"prompt": "hi", "logit_bias": {str(one): 1 for one in range(3 * 10**5)}},
    ]
    waits = []
    async with httpx.AsyncClient(base_url=f"http://{server.address}", timeout=30) as client:
        for body in bodies:
            content = json.dumps(body).encode()
            headers = {"content-type": "application/json"}
            posted = asyncio.create_task(client.post("/v1/completions", content=content, headers=headers))
            while not posted.done():
                began = time.monotonic()
                assert (await client.get("/health")).status_code == 200
                waits.append(time.monotonic() - began)
                await asyncio.sleep(0.02)
            assert (await posted).status_code in (400, 413)
    assert max(waits) < 1.0


async def test_a_taken_port_is_named(server: HttpServer) -> None:
    with pytest.raises(SystemExit, match=rf"http_listen: cannot serve on {server.address}: .*in use"):
        await serve_http(FakeEngine(), Identity(None), Settings(http_listen=server.address))


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999", "203.0.113.1:8000", ":"])
async def test_an_impossible_address_is_named(address: str) -> None:
    with pytest.raises(SystemExit, match="http_listen: cannot serve on"):
        await serve_http(FakeEngine(), Identity(None), Settings(http_listen=address))


async def test_stop_lets_running_answers_end() -> None:
    """Drain: what runs may finish; new connections are refused."""
    engine = FakeEngine(pieces=["x"] * 9)
    server = await serve_http(engine, Identity(None), Settings(drain_seconds=5))
    reader, writer = await connect(server)
    gate = asyncio.Event()
    original = engine._choice

    async def gated(*args: Any) -> Any:
        await gate.wait()
        async for delta in original(*args):
            yield delta

    engine._choice = gated  # type: ignore[method-assign]
    writer.write(request({"prompt": "hi", "stream": True}))
    while not engine.running:
        await asyncio.sleep(0.01)
    stopping = asyncio.create_task(server.stop())
    await asyncio.sleep(0.15)
    with pytest.raises(OSError, match="Connect"):
        await connect(server)
    gate.set()
    assert (await asyncio.wait_for(reader.read(), 5)).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    await asyncio.wait_for(stopping, 5)
    writer.close()


async def test_stop_cuts_what_does_not_end() -> None:
    """A7: a stream that is cut has no clean end."""
    engine = FakeEngine(hang_after=2)
    server = await serve_http(engine, Identity(None), Settings(drain_seconds=0))
    reader, writer = await connect(server)
    writer.write(request({"prompt": "hi", "stream": True}))
    await asyncio.wait_for(engine.hung.wait(), 5)
    await asyncio.wait_for(server.stop(), 5)
    assert not (await asyncio.wait_for(reader.read(), 5)).endswith(b"0\r\n\r\n")
    assert engine.running == 0
    writer.close()
