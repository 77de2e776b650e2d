"""A real kvmanager behind a Unix socket, with peers that speak its streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from quire.v1 import executor_pb2, kvmanager_pb2, kvmanager_pb2_grpc, types_pb2
from services.common.rpc import channel
from services.kvmanager.main import build
from services.kvmanager.settings import KvManagerSettings

MODEL = "a" * 64
LEASE_SECONDS = 0.3
WAIT = 5.0


EXECUTORS = ["e", "copy", "nobody"]
"""Names in the loads of every message that reserves."""


class Scheduler:
    """A scheduler's end of its stream."""

    def __init__(self, stub: Any, name: str = "s") -> None:
        self.call = stub.Reserve()
        self.name = name

    async def hello(self, **fields: Any) -> kvmanager_pb2.ReserveResponse:
        return await self.ask(hello=kvmanager_pb2.ReserveHello(scheduler_id=self.name), **fields)

    async def tell(self, *, epoch: int = 1, **fields: Any) -> None:
        loads = _loads(epoch) if "reservations" in fields else None
        await self.call.write(kvmanager_pb2.ReserveRequest(loads=loads, **fields))

    async def read(self) -> kvmanager_pb2.ReserveResponse:
        message = await asyncio.wait_for(self.call.read(), WAIT)
        assert message is not grpc.aio.EOF, await self.call.code()
        return message

    async def ask(self, **fields: Any) -> kvmanager_pb2.ReserveResponse:
        await self.tell(**fields)
        return await self.read()

    async def reserve(
        self, sequence_id: int, tokens: Iterable[int], *, epoch: int = 1, **fields: Any
    ) -> kvmanager_pb2.ReservationResult:
        response = await self.ask(reservations=[reservation(sequence_id, tokens, **fields)], epoch=epoch)
        (result,) = response.reservations
        return result


class Executor:
    """An executor's end of its stream."""

    def __init__(self, stub: Any, name: str = "e") -> None:
        self.call = stub.Report()
        self.name = name

    async def register(
        self,
        described: types_pb2.ExecutorDescription | None = None,
        *,
        epoch: int = 1,
        inventory: Iterable[executor_pb2.SealedBlock] = (),
    ) -> int:
        """Enters, and states its inventory when it is asked. Returns the acknowledged epoch."""
        entered = await self.enter(described, epoch=epoch)
        return await self.ask(answers=entered.ask, inventory=inventory, epoch=epoch)

    async def enter(
        self, described: types_pb2.ExecutorDescription | None = None, *, epoch: int = 1
    ) -> kvmanager_pb2.ReportResponse:
        described = described or description(self.name)
        await self.call.write(kvmanager_pb2.ReportRequest(description=described, epoch=epoch))
        return await self.read()

    async def ask(self, **fields: Any) -> int:
        await self.call.write(kvmanager_pb2.ReportRequest(**fields))
        return int((await self.read()).epoch)

    async def read(self) -> kvmanager_pb2.ReportResponse:
        message = await asyncio.wait_for(self.call.read(), WAIT)
        assert message is not grpc.aio.EOF, await self.call.code()
        return message

    async def lose(self) -> None:
        self.call.cancel()
        await asyncio.wait([asyncio.ensure_future(self.call.code())])


def description(name: str = "e", blocks: int = 8, model: str = MODEL) -> types_pb2.ExecutorDescription:
    """Blocks of four tokens."""
    return types_pb2.ExecutorDescription(
        executor_id=name,
        model=types_pb2.ModelDescription(fingerprint=model),
        groups=[types_pb2.CacheGroup(group_id=0, name="target", block_size=4)],
        pools=[
            types_pb2.BlockPool(
                pool_id=0, group_id=0, tier=types_pb2.TIER_DEVICE, format=types_pb2.KV_FORMAT_BF16, block_count=blocks
            )
        ],
    )


def _loads(epoch: int) -> kvmanager_pb2.ExecutorLoads:
    count = len(EXECUTORS)
    return kvmanager_pb2.ExecutorLoads(
        executor_ids=EXECUTORS,
        epochs=[epoch] * count,
        running_counts=[0] * count,
        queued_tokens=[0] * count,
        output_tokens=[0] * count,
        slownesses=[1.0] * count,
    )


def reservation(
    sequence_id: int, tokens: Iterable[int], *, executor: str = "e", **fields: Any
) -> kvmanager_pb2.Reservation:
    """One that may go to that executor alone."""
    return kvmanager_pb2.Reservation(
        sequence_id=sequence_id,
        token_ids=tokens,
        load_indexes=[EXECUTORS.index(executor)],
        **{"model_fingerprint": MODEL, "namespace": "default", **fields},
    )


def sealed(response: kvmanager_pb2.ReserveResponse) -> list[executor_pb2.SealedBlock]:
    (of_executor,) = response.sealed
    return list(of_executor.blocks)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
async def stub(tmp_path: Path, registry: CollectorRegistry) -> AsyncIterator[Any]:
    settings = KvManagerSettings(
        listen=f"unix:{tmp_path}/kv.sock", metrics_listen="", lease_seconds=LEASE_SECONDS, drain_seconds=0
    )
    server, servicer = build(settings, registry)
    await server.start()
    await server.set_ready(True)
    async with channel(settings.listen, settings) as peer:
        yield kvmanager_pb2_grpc.KvManagerServiceStub(peer)
    await servicer.close()
    await server.grpc.stop(1.0)


@pytest.fixture
async def scheduler(stub: Any, executor: Executor) -> Scheduler:
    """Connected after the test's own executor."""
    made = Scheduler(stub)
    await made.hello()
    return made


async def status(stub: Any) -> kvmanager_pb2.GetKvStatusResponse:
    response = await stub.GetKvStatus(kvmanager_pb2.GetKvStatusRequest())
    assert list(response.violations) == []
    return response


async def until_available(scheduler: Scheduler, count: int) -> None:
    """Reads pushes until the executor has that many blocks to give."""
    while True:
        message = await scheduler.read()
        if any(space.available_block_count == count for space in message.space):
            return
