"""Clients of other protocols work unmodified: SMG, with the OpenAI client before it, and NVIDIA's own client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import grpc
import numpy as np
import pytest
from openai import BadRequestError, OpenAI

from quire.client import Client
from quire.v1.foreign import smg_common_pb2, vllm_engine_pb2
from quire.v1.foreign.vllm_engine_pb2_grpc import VllmEngineStub
from tests.e2e.stack import HOST, READY_SECONDS, Stack, free_port
from tests.fixtures.models import make_rand_model, make_script_model

SAID = "Hello, world🙂 END never"


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    path = tmp_path_factory.mktemp("script")
    smile = "🙂".encode()
    make_script_model(path, ["Hello", b",", " wor", "ld", *(smile[i : i + 1] for i in range(4)), " END", " never"])
    with Stack(path) as stack:
        yield stack


@contextlib.contextmanager
def smg(worker: str, log: Path) -> Iterator[str]:
    """SMG in front of a gateway: the base URL of its OpenAI API, once it knows the model."""
    http, metrics = free_port(), free_port()
    command = [sys.executable, "-m", "smg", "launch", f"--worker-urls=grpc://{worker}", f"--host={HOST}"]
    command += [f"--port={http}", f"--prometheus-port={metrics}", "--policy=round_robin", "--disable-retries"]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        url, deadline = f"http://{HOST}:{http}", time.monotonic() + READY_SECONDS
        while not models(url):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.1)
        yield f"{url}/v1"
    finally:
        process.kill()
        process.wait(10)


def models(url: str) -> list[str]:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
            return [model["id"] for model in json.load(answer)["data"]]
    except OSError:
        return []


@pytest.mark.skipif(find_spec("smg") is None, reason="smg is not installed")
def test_openai_talks_through_smg(scripted: Stack, tmp_path: Path) -> None:
    log = tmp_path / "smg.log"
    with smg(scripted.gateway, log) as url:
        client = OpenAI(base_url=url, api_key="unused", max_retries=0)
        assert [model.id for model in client.models.list()] == ["tiny"]
        chats = client.chat.completions
        messages = [{"role": "user", "content": "Hi"}]
        whole = chats.create(model="tiny", messages=messages, max_tokens=40)  # type: ignore[arg-type]
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (SAID, "stop"), log.read_text()
        stream = chats.create(
            model="tiny",
            messages=messages,  # type: ignore[arg-type]
            stop=["d🙂 EN"],
            stream=True,
            stream_options={"include_usage": True},
        )
        text, finish, usage = "", None, None
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
        assert (text, finish) == ("Hello, worl", "stop")
        assert usage is not None
        cut = chats.create(model="tiny", messages=messages, max_tokens=2, n=2)  # type: ignore[arg-type]
        assert [(one.message.content, one.finish_reason) for one in cut.choices] == [("Hello,", "length")] * 2
        completion = client.completions.create(model="tiny", prompt="Hi", max_tokens=40)
        assert completion.choices[0].text == SAID
        with pytest.raises(BadRequestError, match="top_p"):
            chats.create(model="tiny", messages=messages, top_p=7)  # type: ignore[arg-type]
        vector = client.embeddings.create(model="tiny", input="Hi", encoding_format="float").data[0].embedding
        with Client(scripted.gateway) as direct:
            assert np.allclose(vector, direct.embed("Hi"))


@pytest.mark.skipif(find_spec("tritonclient") is None, reason="tritonclient is not installed")
async def test_triton_s_client(scripted: Stack) -> None:
    program = Path(__file__).with_name("triton_client.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, program, scripted.gateway, "tiny", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    output, errors = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, errors.decode()
    seen = json.loads(output)
    assert [seen[name] for name in ("live", "ready", "model", "absent")] == [True, True, True, False]
    assert seen["server"] == "quire"
    assert "text_input" in seen["inputs"]
    assert (seen["whole"], seen["with prompt"]) == ([SAID], ["HiHello"])
    status, message = seen["refused"]
    assert "INVALID_ARGUMENT" in status
    assert message.startswith("top_p:")
    assert "".join(seen["pieces"]) == SAID
    assert len(seen["pieces"]) > 1
    assert "text_input" in seen["in stream"]


def test_vectors_and_kv_events(tmp_path: Path) -> None:
    """What a prompt was made into leaves no KV; a prompt that was answered does, and routers hear of it."""
    with Stack(make_rand_model(tmp_path, seed=4)) as stack:
        client = OpenAI(base_url=f"{stack.http}/v1", api_key="unused", max_retries=0)
        prompt = [number % 250 for number in range(100)]
        with grpc.insecure_channel(stack.gateway) as channel, Client(stack.gateway) as direct:
            engine = VllmEngineStub(channel)
            events = engine.SubscribeKvEvents(smg_common_pb2.SubscribeKvEventsRequest(), timeout=60)
            answer = client.embeddings.create(model="tiny", input=[prompt, [5, 6]])  # in base64, as it asks by itself
            [first, second] = [one.embedding for one in answer.data]
            assert np.linalg.norm(first) == pytest.approx(1, abs=1e-5)
            assert answer.usage.total_tokens == 102
            assert np.allclose(first, direct.embed(prompt), atol=1e-6)
            assert not np.allclose(direct.embed(prompt, pooling="mean"), first, atol=1e-2)
            told = engine.Embed(vllm_engine_pb2.EmbedRequest(request_id="e", tokenized={"input_ids": [5, 6]}))
            assert np.allclose(told.embedding, second, atol=1e-6)

            def ask() -> int:
                usage = client.completions.create(model="tiny", prompt=prompt, max_tokens=2).usage
                assert usage is not None
                assert usage.prompt_tokens_details is not None
                return usage.prompt_tokens_details.cached_tokens or 0

            assert ask() == 0
            assert ask() == 96
            stored = [list(block.token_ids) for event in next(events).events for block in event.stored.blocks]
            assert stored[0] == prompt[:32]
            events.cancel()
            loads = engine.GetLoads(vllm_engine_pb2.GetLoadsRequest()).loads[0]
            assert 0 < loads.cache_hit_rate < 1
            assert loads.max_total_num_tokens > 0
