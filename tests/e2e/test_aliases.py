"""A name for two sizes of a model: each request goes where the rules say, and stays there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from quire.v1 import admin_pb2, admin_pb2_grpc, gateway_pb2, gateway_pb2_grpc, scheduler_pb2
from tests.e2e.requests import all_blocks_back, channel, greedy
from tests.e2e.stack import Stack
from tests.fixtures.models import make_rand_model

LONG = 400


def asked(tokens: int) -> gateway_pb2.GenerateStreamRequest:
    return gateway_pb2.GenerateStreamRequest(input=greedy([3, 1, 4, 1, 5], tokens, model="auto"))


async def test_an_alias_picks_and_the_choice_outlives_the_scheduler(tmp_path: Path) -> None:
    small, large = make_rand_model(tmp_path / "small", seed=1), make_rand_model(tmp_path / "large", seed=2)
    rules = {"aliases": "auto=small@output=..20,large"}
    async with Stack(small, name="small", spare_executors=1, scheduler=rules) as stack:
        async with channel(stack.gateway) as wire:
            inference = gateway_pb2_grpc.InferenceServiceStub(wire)
            admin = admin_pb2_grpc.AdminServiceStub(wire)
            alone = [message async for message in inference.GenerateStream(asked(LONG))]
            assert {message.model for message in alone} == {"small"}  # the other one is not loaded
            await admin.ChangeModel(
                admin_pb2.ChangeModelRequest(action=scheduler_pb2.MODEL_ACTION_LOAD, name="large", source=str(large))
            )
            async with asyncio.timeout(20):
                while "large" not in await members(inference):
                    await asyncio.sleep(0.05)
            short = [message async for message in inference.GenerateStream(asked(20))]
            assert {message.model for message in short} == {"small"}
            calm = [message async for message in inference.GenerateStream(asked(LONG))]
            assert {message.model for message in calm} == {"large"}
            stormy = []
            async for message in inference.GenerateStream(asked(LONG)):
                stormy.append(message)
                if len(stormy) == 3:
                    await asyncio.to_thread(stack.kill, "scheduler")
                    await asyncio.to_thread(stack.start, "scheduler")
            assert {message.model for message in stormy} == {"large"}
            assert ids(stormy) == ids(calm) != ids(alone)
        async with httpx.AsyncClient(base_url=stack.http) as http:
            listed = {model["id"]: model for model in (await http.get("/v1/models")).json()["data"]}
            assert listed["auto"]["members"] == ["small", "large"]
            assert "members" not in listed["small"]
            body = {"model": "auto", "prompt": [5, 6], "max_tokens": 5}
            assert (await http.post("/v1/completions", json=body)).json()["model"] == "small"
        await all_blocks_back(stack.gateway)


async def members(inference: gateway_pb2_grpc.InferenceServiceAsyncStub) -> list[str]:
    """The loaded models that the alias stands for."""
    listed = await inference.ListModels(gateway_pb2.ListModelsRequest())
    return [member for model in listed.models if model.name == "auto" for member in model.members]


def ids(messages: list[gateway_pb2.GenerateStreamResponse]) -> list[int]:
    return [token for message in messages for token in message.token_ids]
