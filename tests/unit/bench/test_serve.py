"""The load generator against small servers of both APIs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from concurrent import futures
from typing import Any

import grpc
import httpx
import pytest

from quire.bench import clients
from quire.bench.clients import Ask, Manner, OpenAIClient, server_sent_events
from quire.bench.load import closed_loop, open_loop
from quire.bench.measures import Sample
from quire.bench.serve import main
from quire.bench.workload import Request, fixed_requests
from quire.v1 import gateway_pb2, gateway_pb2_grpc, types_pb2


class Gateway(gateway_pb2_grpc.InferenceServiceServicer):
    """Answers with two tokens a message, unless the model is "missing" or an API key begins with "no"."""

    def __init__(self) -> None:
        self.seen: list[tuple[str | None, int, int, int]] = []  # authorization, priority and both targets

    def GenerateStream(self, request: Any, context: Any) -> Iterator[gateway_pb2.GenerateStreamResponse]:
        shown, asked = dict(context.invocation_metadata()).get("authorization"), request.input
        self.seen.append((shown, asked.priority, asked.target_first_token_ms, asked.target_token_gap_ms))
        if shown is not None and shown.startswith("Bearer no"):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the API key is not known")
        wanted = request.input.stop.max_tokens
        if request.input.model == "missing":
            context.abort(grpc.StatusCode.NOT_FOUND, "no such model")
        assert request.input.stop.ignore_eos
        for _ in range(wanted // 2):
            yield gateway_pb2.GenerateStreamResponse(token_ids=[1, 2])
        usage = types_pb2.Usage(prompt_tokens=len(request.input.text.split()), completion_tokens=wanted)
        yield gateway_pb2.GenerateStreamResponse(usage=usage)


@pytest.fixture
def service() -> Gateway:
    return Gateway()


@pytest.fixture
def gateway(service: Gateway) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    gateway_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


def test_a_closed_loop_over_grpc_ends_with_one_line_of_json(gateway: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--concurrency 3 --requests 7 --prompt-tokens 16 --output-tokens 8 --warmup 2 --json".split()  # noqa: SIM905
    assert main(["--address", gateway, *flags]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["requests"], report["errors"], report["concurrency"]) == (7, 0, 3)
    assert (report["prompt_tokens"], report["output_tokens"]) == (7 * 16, 7 * 8)
    assert set(report) >= {"output_tok_s", "ttft_ms", "itl_ms", "e2e_ms"}


def test_a_table_for_people(gateway: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--address", gateway, "--rate", "500", "--requests", "4"]) == 0
    assert "first token" in capsys.readouterr().out


def test_several_tenants_ask_in_turn(gateway: str, service: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--requests", "6", "--warmup", "0", "--output-tokens", "4", "--api-keys", "qk-a,no-b"]
    urgency = ["--priority", "3", "--target-first-token-ms", "500", "--target-token-gap-ms", "40"]
    assert main(["--address", gateway, *flags, *urgency, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    parts = [(part["requests"], part["errors"], part["output_tokens"]) for part in report["by_key"]]
    assert parts == [(3, 0, 12), (3, 3, 0)]
    assert report["error_kinds"] == {"UNAUTHENTICATED": 3}
    assert set(service.seen) == {(f"Bearer {key}", 3, 500, 40) for key in ("qk-a", "no-b")}
    assert main(["--address", gateway, *flags]) == 0
    assert "key 1" in capsys.readouterr().out


def test_without_a_key_none_is_shown(gateway: str, service: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    assert main(["--address", gateway, "--requests", "2", "--warmup", "0"]) == 0
    assert service.seen == [(None, 0, 0, 0)] * 2


def test_failures_are_counted_by_kind(gateway: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--address", gateway, "--model", "missing", "--requests", "3", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["error_kinds"], report["error_messages"]) == ({"NOT_FOUND": 3}, {"NOT_FOUND": "no such model"})


def test_a_load_of_which_nothing_was_answered_is_no_table(gateway: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--address", gateway, "--model", "missing", "--requests", "3"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.endswith("quire bench serve: no request was answered: NOT_FOUND x 3 (no such model)\n")


def test_a_table_says_why_some_failed(gateway: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--address", gateway, "--requests", "4", "--api-keys", "qk-a,no-b"]) == 0
    assert "failed: UNAUTHENTICATED x 2 (the API key is not known)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags", [["--api", "openai"], ["--base-url", "http://x"], ["--rate", "0"], ["--requests", "0"]]
)
def test_wrong_flags_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        main(flags)
    assert refusal.value.code == 2


def test_a_missing_trace_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace", "/no/such/trace.csv"]) == 2
    assert "trace.csv" in capsys.readouterr().err


async def ask_openai(
    events: list[str], monkeypatch: pytest.MonkeyPatch, status: int = 200, manner: Manner | None = None
) -> Sample:
    seen: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "found"}]})
        seen.append(json.loads(request.content) | {"headers": request.headers})

        async def body() -> AsyncIterator[bytes]:
            for event in events:
                yield f"data: {event}\n\n".encode()

        return httpx.Response(status, content=body())

    plain = httpx.AsyncClient
    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(clients.httpx, "AsyncClient", lambda headers, **_: plain(transport=transport, headers=headers))
    manner = manner or Manner()
    async with OpenAIClient("http://server/v1/", manner, 1) as client:
        sample = await client.ask(Ask("hi", 3, 0.0))
    assert seen[0]["model"] == "found"
    assert seen[0]["stream_options"] == {"include_usage": True}
    assert seen[0].get("priority") == manner.priority
    assert seen[0]["headers"].get("authorization") == (f"Bearer {manner.api_keys[0]}" if manner.api_keys[0] else None)
    for name, value in (("ttft", manner.target_first_token_ms), ("tpot", manner.target_token_gap_ms)):
        assert seen[0]["headers"].get(f"x-slo-{name}-ms") == (None if value is None else str(value))
    return sample


def chunk(text: str, **more: Any) -> str:
    return json.dumps({"choices": [{"text": text}]} | more, separators=(",", ":"))


USAGE = json.dumps({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}})


async def test_openai_streams_count_messages_with_text(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [chunk(""), chunk("a"), chunk("bc"), USAGE, "[DONE]"]
    sample = await ask_openai(events, monkeypatch)
    assert (sample.error, len(sample.arrivals), sample.output_tokens, sample.prompt_tokens) == (None, 2, 4, 5)


async def test_openai_requests_say_who_asks_and_how_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    manner = Manner(api_keys=("qk-a",), priority=3, target_first_token_ms=500, target_token_gap_ms=40)
    sample = await ask_openai([chunk("a"), "[DONE]"], monkeypatch, manner=manner)
    assert (sample.error, sample.caller) == (None, 0)


async def test_openai_usage_beside_text_and_null_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 4}
    events = [chunk("a", usage=None), chunk("b", usage=usage), "[DONE]"]
    sample = await ask_openai(events, monkeypatch)
    assert (sample.error, len(sample.arrivals), sample.output_tokens) == (None, 2, 4)


async def test_openai_servers_without_usage_are_taken_at_a_token_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = await ask_openai([chunk("a"), chunk("b"), "[DONE]"], monkeypatch)
    assert (sample.error, sample.output_tokens) == (None, 2)


@pytest.mark.parametrize(
    ("events", "status", "error"),
    [
        ([chunk("a")], 200, "CUT_STREAM"),
        (["[DONE]"], 200, "EMPTY_ANSWER"),
        ([], 429, "HTTP_429"),
        ([chunk("a"), '{"error": {"code": "engine_lost", "message": "gone"}}'], 200, "engine_lost"),
    ],
)
async def test_openai_failures(events: list[str], status: int, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await ask_openai(events, monkeypatch, status)).error == error


@pytest.mark.parametrize("size", [1, 2, 7, 100])
async def test_events_survive_any_cut(size: int) -> None:
    stream = b": comment\n\ndata: one\r\n\r\ndata:two\n\ndata: [DONE]\n\n"

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(stream), size):
            yield stream[start : start + size]

    assert [event async for event in server_sent_events(chunks())] == [b"one", b"two", b"[DONE]"]


class Recorder:
    """A client that notes how many requests run at once."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self.dues: list[float] = []

    async def ask(self, ask: Ask) -> Sample:
        self.dues.append(ask.due)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.02)
        self.running -= 1
        return Sample(ask.due)

    async def __aenter__(self) -> Recorder:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


async def test_a_closed_loop_keeps_its_number_running() -> None:
    client, done = Recorder(), list[Sample]()
    await closed_loop(client, fixed_requests(10, 4, 4), 3, 0, done.append)
    assert (client.most, len(done)) == (3, 10)


async def test_an_open_loop_sends_when_due_however_many_run() -> None:
    client, done = Recorder(), list[Sample]()
    requests = [Request(index, arrival, 4, 4) for index, arrival in enumerate([0.0, 0.0, 0.005, 0.05])]
    await open_loop(client, requests, 0, done.append)
    assert (client.most, len(done)) == (3, 4)
    assert [due - client.dues[0] for due in client.dues] == pytest.approx([0.0, 0.0, 0.005, 0.05])


async def test_each_openai_request_opens_a_connection() -> None:
    opened = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        body = f"data: {chunk('a')}\n\ndata: [DONE]\n\n".encode()
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                await reader.readexactly(int(length.partition(b":")[2]))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        except asyncio.IncompleteReadError:
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with OpenAIClient(f"http://127.0.0.1:{port}/v1", Manner("m"), 1) as client:
            samples = [await client.ask(Ask("hi", 1, 0.0)) for _ in range(3)]
    assert [sample.error for sample in samples] == [None] * 3
    assert opened == 3
