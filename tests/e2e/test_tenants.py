"""Tenants on the whole stack: what one has cached or runs is nobody else's business."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import grpc
import httpx
import pytest

from quire.client import bearer
from quire.v1 import admin_pb2, admin_pb2_grpc, gateway_pb2, gateway_pb2_grpc
from tests.contract.gateway.keys import ACME, BLUE, OPERATOR, write_keys
from tests.e2e.requests import channel, greedy
from tests.e2e.stack import Stack
from tests.fixtures.models import make_rand_model

PROMPT = [(5 * n * n + 3) % 256 for n in range(100)]  # three full blocks and a part


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("tenants")
    keys = write_keys(folder)
    with Stack(make_rand_model(folder / "model", seed=52), gateway={"keys": keys}) as running:
        yield running


async def test_prompts_are_cached_for_their_own_tenant_only(stack: Stack) -> None:
    """Kind 14, on both surfaces: neither usage nor the answer tells what another tenant has asked."""

    async def over_grpc(key: str) -> int:
        async with channel(stack.gateway) as wire:
            request = gateway_pb2.GenerateRequest(input=greedy(PROMPT, 2))
            answer = await gateway_pb2_grpc.InferenceServiceStub(wire).Generate(request, metadata=bearer(key))
        return answer.usage.cached_tokens

    async def over_http(key: str) -> int:
        async with httpx.AsyncClient(base_url=stack.http, headers={"authorization": f"Bearer {key}"}) as client:
            answer = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2, "user": "acme"})
        cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached

    assert await over_grpc(ACME) == 0
    assert await over_grpc(ACME) == 96
    assert await over_http(BLUE) == 0
    assert await over_http(OPERATOR) == 96, "both keys are acme's"
    assert await over_grpc(BLUE) == 96


async def test_one_request_id_runs_once_for_each_tenant(stack: Stack) -> None:
    """Kind 14: through gateway and scheduler."""

    async def begin(stub: gateway_pb2_grpc.InferenceServiceAsyncStub, key: str) -> int:
        call = stub.GenerateStream(
            gateway_pb2.GenerateStreamRequest(input=greedy([7], 300, request_id="r")), metadata=bearer(key)
        )
        return sum([len(message.token_ids) async for message in call])

    async with channel(stack.gateway) as wire:
        stub = gateway_pb2_grpc.InferenceServiceStub(wire)
        assert await asyncio.gather(begin(stub, ACME), begin(stub, BLUE)) == [300, 300]


def test_the_command_line_shows_its_key(stack: Stack) -> None:
    def quire(*arguments: str, key: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "QUIRE_API_KEY": key, "QUIRE_ADDRESS": stack.gateway}
        command = [sys.executable, "-m", "quire.cli", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    assert quire("generate", "a", "--max-tokens", "2", key=BLUE).returncode == 0
    refused = quire("generate", "a", key="qk-none")
    assert (refused.returncode, refused.stderr) == (1, "quire generate: the API key is not known (UNAUTHENTICATED)\n")
    above = quire("generate", "a", "--priority", "1", key=BLUE)
    assert "priority: 1 is above 0" in above.stderr
    assert "scope 'admin'" in quire("status", key=ACME).stdout
    shown = quire("status", "--kv", "--json", key=OPERATOR)
    assert shown.returncode == 0, shown.stderr
    assert '"namespace": "acme"' in shown.stdout


def test_probes_need_no_key(stack: Stack) -> None:
    assert httpx.get(f"{stack.http}/health").status_code == 200
    assert httpx.get(stack.metrics("gateway")).status_code == 200
    with grpc.insecure_channel(stack.gateway) as wire, pytest.raises(grpc.RpcError, match="API key"):
        admin_pb2_grpc.AdminServiceStub(wire).GetStatus(admin_pb2.GetStatusRequest(), timeout=10)
