"""A gateway's gRPC server in this process, behind it a scheduler that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from prometheus_client import CollectorRegistry

from quire.v1 import admin_pb2_grpc, gateway_pb2_grpc
from services.common.rpc import OPTIONS, Server
from services.common.store import Store
from services.gateway.engine import Engine
from services.gateway.identity import Identity
from services.gateway.keys.redis import RedisKeys
from services.gateway.main import Readiness, make_server, open_journal, open_keys, open_quota
from services.gateway.settings import GatewaySettings
from tests.contract.gateway.fake_scheduler import FakeScheduler


class Stack(NamedTuple):
    """What a test holds on to."""

    scheduler: FakeScheduler
    engine: Engine
    server: Server
    registry: CollectorRegistry
    channel: grpc.aio.Channel
    inference: gateway_pb2_grpc.InferenceServiceAsyncStub
    admin: admin_pb2_grpc.AdminServiceAsyncStub


@asynccontextmanager
async def running(
    folder: Path, scheduler: FakeScheduler, *others: FakeScheduler, name: str = "gateway", **settings: Any
) -> AsyncIterator[Stack]:
    listen = f"unix:{folder}/{name}.sock"
    targets = ",".join(one.target for one in (scheduler, *others))
    chosen = GatewaySettings(
        listen=listen, scheduler=targets, metrics_listen="", http_listen="", drain_seconds=5, **settings
    )
    registry = CollectorRegistry()
    store = None if chosen.redis is None else Store(chosen.redis.get_secret_value())
    engine = Engine(chosen, registry, open_quota(chosen, registry, store), open_journal(chosen, store))
    keys = open_keys(chosen, store)
    if isinstance(keys, RedisKeys):
        await keys.start()
    server = make_server(engine, Identity(keys), chosen, registry)
    await server.start()
    readiness = Readiness(server)
    engine.start(readiness.tell)
    async with grpc.aio.insecure_channel(listen, options=OPTIONS) as channel:
        inference = gateway_pb2_grpc.InferenceServiceStub(channel)
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        yield Stack(scheduler, engine, server, registry, channel, inference, admin)
    await server.grpc.stop(0)
    readiness.stop()
    await engine.stop()
    if isinstance(keys, RedisKeys):
        await keys.stop()
    if store is not None:
        await store.close()


async def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler(f"unix:{tmp_path}/scheduler.sock")
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def stack(tmp_path: Path, scheduler: FakeScheduler) -> AsyncIterator[Stack]:
    async with running(tmp_path, scheduler) as made:
        await eventually(lambda: made.engine.ready)
        yield made
