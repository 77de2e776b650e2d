"""Executors drain, join and leave while requests run, over real streams."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire.v1 import scheduler_pb2, scheduler_status_pb2, types_pb2
from services.common.errors import Reason, from_rpc_error
from tests.contract.scheduler.peers import World, until
from tests.unit.scheduler.sim import submit
from tests.unit.scheduler.sim_executor import describe, reference

ADD, DRAIN = scheduler_pb2.EXECUTOR_ACTION_ADD, scheduler_pb2.EXECUTOR_ACTION_DRAIN
REMOVE = scheduler_pb2.EXECUTOR_ACTION_REMOVE
TOKENS = 120


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path, describe())
    await made.start_kvmanager()
    yield made
    await made.close()


async def start(world: World, count: int, in_use: int, **settings: Any) -> None:
    """So many executors that run, of which the scheduler knows the first ones."""
    for index in range(count):
        executor = await world.start_executor(describe(executor_id=f"e{index}", blocks=400))
        executor.step_seconds = 0.002
    await world.start_scheduler(in_use, **settings)
    await world.ready()
    await until(lambda: all(e.connected for e in world.loop.state.executors))


async def manage(world: World, action: scheduler_pb2.ExecutorAction.ValueType, target: str) -> dict[str, Any]:
    """The executors after a change, by target."""
    request = scheduler_pb2.ManageExecutorRequest(action=action, target=target)
    return {one.target: one for one in (await world.stub.ManageExecutor(request)).executors}


async def refusal(world: World, action: scheduler_pb2.ExecutorAction.ValueType, target: str) -> Reason:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await manage(world, action, target)
    return from_rpc_error(refused.value, Reason.INTERNAL).reason


async def load(world: World, handles: range) -> Any:
    """Requests that all have streamed a few tokens."""
    gateway = await world.gateway()
    await gateway.submit(*(submit(h, [h] * 9, TOKENS, ignore_eos=True) for h in handles))
    await until(lambda: all(len(client.outputs[0]) >= 3 for client in gateway.clients.values()))
    return gateway


async def finish(world: World, gateway: Any, handles: range) -> None:
    await gateway.done(*handles)
    for handle in handles:
        client = gateway.clients[handle]
        assert (client.outputs[0], client.ends[0].reason) == reference(client.submit, 0)
    await world.assert_no_blocks_held()


def sequences(world: World, index: int) -> int:
    return len(world.executors[index].sim.sequences)


async def test_sequences_leave_an_executor_that_is_about_to_end(world: World) -> None:
    await start(world, 2, 2)
    handles = range(1, 7)
    gateway = await load(world, handles)
    assert sequences(world, 0)
    world.executors[0].drain(30.0)
    await until(lambda: sequences(world, 0) == 0)
    status = await world.stub.GetSchedulerStatus(scheduler_status_pb2.GetSchedulerStatusRequest())
    assert [e.draining for e in status.executors] == [True, False]
    await world.executors[0].stop()
    await world.executors[0].start()  # another process at the same address: nobody remembers that it drained
    await until(lambda: len(world.executors[0].hellos) == 2)
    await finish(world, gateway, handles)
    await until(lambda: not world.loop.state.executors[0].draining)
    more = range(11, 17)
    await gateway.submit(*(submit(h, [h] * 9, 20, ignore_eos=True) for h in more))
    await until(lambda: bool(world.executors[0].sim.sequences))
    await finish(world, gateway, more)


async def test_what_cannot_move_ends_where_it_runs_and_newcomers_wait(world: World) -> None:
    await start(world, 1, 1)
    gateway = await load(world, range(1, 4))
    world.executors[0].drain(30.0)
    await until(lambda: not world.server.ready)
    await gateway.submit(submit(4, [4] * 9, TOKENS, ignore_eos=True))
    await gateway.done(1, 2, 3)
    assert len(world.executors[0].hellos) == 1
    assert gateway.clients[4].outputs[0] == []
    await world.executors[0].stop()
    await world.executors[0].start()
    await finish(world, gateway, range(1, 5))


async def test_an_executor_joins_by_its_address_alone(world: World) -> None:
    await start(world, 2, 1)
    handles = range(1, 13)  # more than one takes
    gateway = await world.gateway()
    await gateway.submit(*(submit(h, [h] * 9, TOKENS, ignore_eos=True) for h in handles))
    await until(lambda: bool(sequences(world, 0)))
    executors = await manage(world, ADD, world.target("e1"))
    assert [(e.number, e.connected, e.draining) for e in executors.values()] == [(0, True, False), (1, True, False)]
    await until(lambda: bool(sequences(world, 1)))
    await finish(world, gateway, handles)


async def test_drained_by_an_operator_and_used_again(world: World) -> None:
    await start(world, 2, 2)
    handles = range(1, 7)
    gateway = await load(world, handles)
    target = world.target("e0")
    assert (await manage(world, DRAIN, target))[target].draining
    await until(lambda: sequences(world, 0) == 0)
    await world.executors[0].stop()
    await world.executors[0].start()
    await until(lambda: len(world.executors[0].hellos) == 2)
    assert world.loop.state.executors[0].draining  # until somebody says otherwise, whatever process is there
    await finish(world, gateway, handles)
    assert not (await manage(world, ADD, target))[target].draining


async def test_a_removed_executor_is_left_alone(world: World) -> None:
    await start(world, 2, 2)
    handles = range(1, 7)
    gateway = await load(world, handles)
    assert list(await manage(world, REMOVE, world.target("e0"))) == [world.target("e1")]
    await finish(world, gateway, handles)
    assert len(world.executors[0].hellos) == 1
    executors = await manage(world, ADD, world.target("e0"))
    assert [e.number for e in executors.values()] == [1, 2]
    assert len(world.executors[0].hellos) == 2


async def test_an_empty_executor_that_joins_can_be_given_a_model(world: World) -> None:
    await start(world, 1, 1)
    free = describe(executor_id="e1")
    free.ClearField("model")
    await world.start_executor(free)
    await manage(world, ADD, world.target("e1"))
    request = scheduler_pb2.ManageModelRequest(action=scheduler_pb2.MODEL_ACTION_LOAD, name="b", source="here")
    assert [model.name for model in (await world.stub.ManageModel(request)).models] == ["b", "m"]
    gateway = await world.gateway()
    await gateway.submit(submit(1, [1] * 9, 10, model="b", ignore_eos=True))
    await finish(world, gateway, range(1, 2))


async def test_a_drained_empty_executor_is_given_no_model(world: World) -> None:
    await start(world, 1, 1)
    free = describe(executor_id="e1")
    free.ClearField("model")
    await world.start_executor(free)
    await manage(world, ADD, world.target("e1"))
    await manage(world, DRAIN, world.target("e1"))
    request = scheduler_pb2.ManageModelRequest(action=scheduler_pb2.MODEL_ACTION_LOAD, name="b", source="here")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await world.stub.ManageModel(request)
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_changes_that_cannot_be(world: World) -> None:
    await start(world, 1, 1)
    here = world.target("e0")
    assert await refusal(world, ADD, here) is Reason.ALREADY_EXISTS
    assert await refusal(world, ADD, f"unix:{world.folder}/../{world.folder.name}/e0") is Reason.ALREADY_EXISTS
    assert await refusal(world, ADD, world.target("nobody")) is Reason.EXECUTOR_LOST
    assert await refusal(world, ADD, world.target("kv")) is Reason.EXECUTOR_LOST  # no executor, but somebody
    assert await refusal(world, DRAIN, world.target("nobody")) is Reason.NOT_FOUND
    assert await refusal(world, REMOVE, world.target("nobody")) is Reason.NOT_FOUND
    assert await refusal(world, ADD, "") is Reason.INVALID_FIELD
    assert await refusal(world, scheduler_pb2.EXECUTOR_ACTION_UNSPECIFIED, here) is Reason.INVALID_FIELD
    assert len(world.executors[0].hellos) == 1
    assert [e.target for e in world.loop.state.executors] == [here]
    gateway = await load(world, range(1, 3))
    await finish(world, gateway, range(1, 3))


async def test_removing_the_last_one_ends_requests_with_a_reason_in_time(world: World) -> None:
    await start(world, 1, 1, resume_seconds=0.2)
    gateway = await load(world, range(1, 2))
    assert await manage(world, REMOVE, world.target("e0")) == {}
    await gateway.done(1)
    end = gateway.clients[1].ends[0]
    assert (end.reason, end.error.reason) == (types_pb2.FINISH_REASON_ERROR, "EXECUTOR_LOST")
    await asyncio.sleep(0)
    assert not world.server.ready


async def test_one_whose_operator_does_not_wait_for_it_is_not_in_use(world: World) -> None:
    """It answers, but takes its time to open a stream; the operator gives up meanwhile."""
    await start(world, 2, 1)
    state, here, late = world.loop.state, world.target("e0"), world.executors[1]
    late.opens.clear()
    adding = asyncio.create_task(manage(world, ADD, world.target("e1")))
    await until(lambda: len(state.executors) == 2)
    adding.cancel()
    await until(lambda: [e.target for e in state.executors] == [here])
    assert list(world.loop.executors) == [0]
    late.opens.set()
    assert list(await manage(world, ADD, world.target("e1"))) == [here, world.target("e1")]
    gateway = await load(world, range(1, 3))
    await finish(world, gateway, range(1, 3))


async def test_a_removal_is_whole_even_if_its_operator_leaves(world: World) -> None:
    await start(world, 2, 2)
    gateway = await load(world, range(1, 7))
    leaving = world.loop.state.executors[0]
    removing = asyncio.create_task(world.loop.remove_executor(leaving))
    while leaving.index in world.loop.executors:  # until it has begun
        await asyncio.sleep(0)
    removing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await removing
    assert world.loop.state.executors == [e for e in world.loop.state.executors if e is not leaving]
    assert not leaving.running
    await finish(world, gateway, range(1, 7))
