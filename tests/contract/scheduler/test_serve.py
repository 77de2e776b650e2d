"""The scheduler over real streams: requests in, tokens out, and what every kind of loss does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.v1 import scheduler_pb2, scheduler_status_pb2, types_pb2
from services.common.errors import QuireError, Reason
from tests.contract.scheduler.peers import BUNDLE, World, until
from tests.unit.scheduler.sim import submit
from tests.unit.scheduler.sim_executor import describe, reference

ERROR = types_pb2.FINISH_REASON_ERROR


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path, describe(blocks=1100))
    await made.start_kvmanager()
    yield made
    await made.close()


async def start(world: World, *descriptions: types_pb2.ExecutorDescription, **settings: Any) -> None:
    for description in descriptions or (describe(blocks=1100),):
        await world.start_executor(description)
    await world.start_scheduler(len(world.executors), **settings)
    await world.ready()


def assert_correct(gateway: Any, *handles: int) -> None:
    for handle in handles:
        client = gateway.clients[handle]
        for choice in range(client.submit.choice_count):
            assert (client.outputs[choice], client.ends[choice].reason) == reference(client.submit, choice)


async def test_requests_are_answered_and_blocks_return(world: World) -> None:
    await start(world)
    gateway = await world.gateway()
    await gateway.submit(
        submit(1, [1, 2, 3], 20),
        submit(2, list(range(1, 60)), 10, choice_count=3),
        submit(3, [9], 5, stop=["x"], ignore_eos=True),
    )
    await gateway.done(1, 2, 3)
    assert_correct(gateway, 1, 2, 3)
    assert [m.name for m in gateway.models] == ["m"]
    for client in gateway.clients.values():
        assert len(client.started) == 1
    await world.assert_no_blocks_held()


async def test_second_request_finds_the_first_ones_prompt(world: World) -> None:
    await start(world)
    gateway = await world.gateway()
    prompt = list(range(1, 34))
    await gateway.submit(submit(1, prompt, 1))
    await gateway.done(1)
    await gateway.submit(submit(2, prompt, 6))
    await gateway.done(2)
    assert_correct(gateway, 1, 2)
    assert gateway.clients[2].started[0].cached_tokens == 32  # ready although the first request ended at once


async def test_n_choices_share_the_lead_prompt(world: World) -> None:
    """B2: choices end apart, each with its own reason; all but the first are forks that share the prompt's blocks."""
    await start(world)
    gateway = await world.gateway()
    await gateway.submit(submit(1, list(range(1, 34)), 30, choice_count=4))
    await gateway.done(1)
    assert_correct(gateway, 1)
    assert len({tuple(output) for output in gateway.clients[1].outputs.values()}) == 4
    assert world.loop.state.executors[0].counters.prefix_hit_tokens == 3 * 32


async def test_cancel_and_gateway_loss_free_everything(world: World) -> None:
    """D2: cancelled requests and those of a gateway that left give their blocks back."""
    await start(world)
    world.executors[0].step_seconds = 0.01
    first, second = await world.gateway("g1"), await world.gateway("g2")
    await first.submit(submit(1, [1] * 30, 200, ignore_eos=True), submit(2, [2] * 5, 20, ignore_eos=True))
    await second.submit(submit(3, [3] * 30, 200, ignore_eos=True))
    await until(lambda: bool(first.clients[1].outputs[0] and second.clients[3].outputs[0]))
    await first.send(cancels=[scheduler_pb2.Cancel(handle=1)])
    await second.close()
    await first.done(1, 2)
    assert first.clients[1].ends[0].reason == types_pb2.FINISH_REASON_CANCELLED
    assert_correct(first, 2)
    await world.assert_no_blocks_held()
    await until(lambda: not world.loop.state.request_ids)


async def test_stop_at_ends_a_choice(world: World) -> None:
    await start(world)
    gateway = await world.gateway()
    await gateway.submit(submit(1, [4, 4], 500, stop=["x"], ignore_eos=True))
    await until(lambda: len(gateway.clients[1].outputs[0]) >= 3)
    await gateway.send(stops=[scheduler_pb2.StopAt(handle=1, choice=0, output_length=2)])
    await gateway.done(1)
    assert gateway.clients[1].ends[0].reason == types_pb2.FINISH_REASON_STOP
    await world.assert_no_blocks_held()


async def test_hold_pauses_and_resumes(world: World) -> None:
    """L4: a held request stops growing within its credit and goes on afterwards."""
    await start(world)
    gateway = await world.gateway()
    await gateway.submit(submit(1, [4, 4], 150, ignore_eos=True), submit(2, [5], 60, ignore_eos=True))
    await until(lambda: len(gateway.clients[1].outputs[0]) >= 3)
    await gateway.send(holds=[scheduler_pb2.Hold(handle=1, held=True)])
    await gateway.done(2)
    await asyncio.sleep(0.1)
    length = len(gateway.clients[1].outputs[0])
    await asyncio.sleep(0.1)
    assert len(gateway.clients[1].outputs[0]) == length < 150
    await gateway.send(holds=[scheduler_pb2.Hold(handle=1, held=False)])
    await gateway.done(1)
    assert_correct(gateway, 1, 2)


async def test_preemption_over_the_wire(world: World) -> None:
    """E1: a pool for 2.5 of 6."""
    await start(world, describe(blocks=25, max_sequences=6), lookahead_tokens=4)
    gateway = await world.gateway()
    handles = range(1, 7)
    await gateway.submit(*(submit(h, [h] * 10, 30, ignore_eos=True) for h in handles))
    await gateway.done(*handles)
    assert_correct(gateway, *handles)
    status = await world.stub.GetSchedulerStatus(scheduler_status_pb2.GetSchedulerStatusRequest())
    assert status.preemption_count > 0
    await world.assert_no_blocks_held()


@pytest.mark.parametrize("how", ["gap", "restart", "kvmanager"])
async def test_streams_resume_after_a_loss(world: World, how: str) -> None:
    """E3: an executor's stream breaks, an executor restarts, the kvmanager restarts empty: no token lost or twice."""
    await start(world)
    world.executors[0].step_seconds = 0.005
    gateway = await world.gateway()
    await gateway.submit(submit(1, [1] * 9, 60, ignore_eos=True, choice_count=2), submit(2, [2] * 40, 60))
    await until(lambda: len(gateway.clients[1].outputs[0]) >= 5)
    if how == "gap":
        world.executors[0].break_stream(QuireError(Reason.PLAN_GAP, "a plan was missing"))
    elif how == "restart":
        await world.executors[0].stop()
        await until(lambda: not world.server.ready)
        await world.executors[0].start()
    else:
        await world.lose_kvmanager()
    if how != "kvmanager":
        await until(lambda: len(world.executors[0].hellos) >= 2)
    assert not gateway.clients[1].done
    world.executors[0].step_seconds = 0.0005
    await gateway.done(1, 2)
    assert_correct(gateway, 1, 2)
    assert (len(world.executors[0].hellos) == 1) == (how == "kvmanager")  # its restart opens no new epoch
    await world.assert_no_blocks_held()


async def test_other_executor_takes_over(world: World) -> None:
    """E3: two replicas; the sequences of the one that dies go on at the other."""
    await start(world, describe(executor_id="e0"), describe(executor_id="e1"))
    await until(lambda: all(e.connected for e in world.loop.state.executors))
    for executor in world.executors:
        executor.step_seconds = 0.005
    gateway = await world.gateway()
    await gateway.submit(*(submit(h, [h] * 9, 60, ignore_eos=True) for h in range(1, 7)))
    await until(lambda: all(e.running for e in world.loop.state.executors), 10)
    await until(lambda: all(len(c.outputs[0]) >= 3 for c in gateway.clients.values()))
    await world.executors[0].stop()
    world.executors[1].step_seconds = 0.0005
    await gateway.done(*range(1, 7))
    assert_correct(gateway, *range(1, 7))
    assert world.server.ready


async def test_lost_executor_ends_requests_with_its_reason(world: World) -> None:
    """A7, K1: after the time to resume, a clear retryable error; readiness is gone at once."""
    await start(world, resume_seconds=0.2)
    gateway = await world.gateway()
    await gateway.submit(submit(1, [1] * 9, 500, ignore_eos=True))
    await until(lambda: len(gateway.clients[1].outputs[0]) >= 3)
    await world.executors[0].stop()
    await gateway.done(1)
    end = gateway.clients[1].ends[0]
    assert (end.reason, end.error.reason, end.error.retryable) == (ERROR, "EXECUTOR_LOST", True)
    assert world.readiness == [True, False]
    assert gateway.models == []


async def test_lost_kvmanager_ends_requests_with_its_reason(world: World) -> None:
    await start(world, resume_seconds=0.2)
    gateway = await world.gateway()
    await gateway.submit(submit(1, [1] * 9, 4000, ignore_eos=True))
    await until(lambda: len(gateway.clients[1].outputs[0]) >= 3)
    await world.stop_kvmanager()
    await gateway.done(1)
    assert gateway.clients[1].ends[0].error.reason == "KVMANAGER_LOST"
    assert not world.server.ready


async def test_frozen_executor_counts_as_lost(world: World) -> None:
    """K1: a stream that stays open without results is given up; work goes on once the executor computes again."""
    await start(world, stall_seconds=0.2)
    gateway = await world.gateway()
    await gateway.submit(submit(1, [1] * 9, 40, ignore_eos=True))
    await until(lambda: len(gateway.clients[1].outputs[0]) >= 2)
    world.executors[0].frozen = True
    await until(lambda: len(world.executors[0].hellos) >= 2)
    world.executors[0].frozen = False
    await gateway.done(1)
    assert_correct(gateway, 1)


async def test_resubmitted_request_goes_on_behind_its_progress(world: World) -> None:
    await start(world)
    whole = submit(1, [5, 6], 12, ignore_eos=True, choice_count=2)
    output, _ = reference(whole, 0)
    whole.progress.add(choice=0, token_ids=output[:7])
    whole.progress.add(choice=1, token_ids=[], ended=True)
    gateway = await world.gateway()
    await gateway.submit(whole)
    await until(lambda: 0 in gateway.clients[1].ends)
    assert gateway.clients[1].outputs[0] == output
    await until(lambda: not world.loop.state.request_ids)
    assert 1 not in gateway.clients[1].ends


async def test_bad_requests_end_alone(world: World) -> None:
    """B6, C2: each bad Submit gets its own error; a neighbour's answer is unchanged."""
    await start(world)
    gateway = await world.gateway()
    bad = {
        2: ({"prompt_token_ids": [1000]}, "INVALID_FIELD"),
        3: ({"choice_count": 65}, "INVALID_FIELD"),
        4: ({"deadline_ms": -1}, "INVALID_FIELD"),
        5: ({"adapter": "a"}, "UNSUPPORTED"),
        6: ({"beam_width": 33}, "INVALID_FIELD"),
        7: ({"speculation": "17"}, "INVALID_FIELD"),
        14: ({"speculation": "4", "beam_width": 2}, "UNSUPPORTED"),
        8: ({"model": "other"}, "MODEL_NOT_FOUND"),
        9: ({"request_id": "r1"}, "ALREADY_EXISTS"),
        10: ({"priority": 101}, "INVALID_FIELD"),
    }
    submits = [submit(handle, [1], 5, **fields) for handle, (fields, _) in bad.items()]
    no_limit, no_prompt, too_long = submit(11, [1]), submit(12, []), submit(13, [1], 4096)
    no_limit.stop.ClearField("max_tokens")
    bad |= {11: ({}, "INVALID_FIELD"), 12: ({}, "INVALID_FIELD"), 13: ({}, "CONTEXT_EXCEEDED")}
    world.executors[0].step_seconds = 0.002
    await gateway.submit(submit(1, [1, 2, 3], 60, ignore_eos=True), *submits, no_limit, no_prompt, too_long)
    await until(lambda: all(gateway.clients[handle].ends for handle in bad))
    for handle, (_, reason) in bad.items():
        end = gateway.clients[handle].ends[0]
        assert (end.reason, end.error.reason) == (ERROR, reason), handle
    await gateway.send(attaches=[scheduler_pb2.Attach(handle=20, request_id="r", next_positions=[0])])
    gateway.clients[20] = gateway.clients[2]
    await until(lambda: any(e.handle == 20 for m in gateway.messages for e in m.ended))
    await gateway.done(1)
    assert_correct(gateway, 1)


async def test_never_fitting_request_ends_at_once(world: World) -> None:
    await start(world, describe(blocks=8))
    gateway = await world.gateway()
    await gateway.submit(submit(1, [1] * 40, 5, choice_count=2), submit(2, [1] * 4, 5))
    await gateway.done(1, 2)
    assert {end.error.reason for end in gateway.clients[1].ends.values()} == {"NEVER_FITS"}
    assert_correct(gateway, 2)


async def test_deadline_ends_running_and_waiting_requests(world: World) -> None:
    await start(world, describe(blocks=1100, max_sequences=1))
    world.executors[0].step_seconds = 0.01
    gateway = await world.gateway()
    await gateway.submit(submit(1, [1], 3000, ignore_eos=True, deadline_ms=400))
    await until(lambda: bool(gateway.clients[1].outputs[0]))
    await gateway.submit(submit(2, [2], 5, deadline_ms=100), submit(3, [3], 5))
    await gateway.done(1, 2, 3)
    assert gateway.clients[1].ends[0].error.reason == "DEADLINE"
    assert gateway.clients[1].outputs[0]
    assert gateway.clients[2].ends[0].error.reason == "DEADLINE"
    assert gateway.clients[2].outputs[0] == []
    assert_correct(gateway, 3)


async def test_full_queue_refuses(world: World) -> None:
    await start(world, describe(max_sequences=1), max_queued=3)
    gateway = await world.gateway()
    await gateway.submit(*(submit(h, [h], 20, ignore_eos=True) for h in range(1, 8)))
    await gateway.done(*range(1, 8))
    reasons = [gateway.clients[h].ends[0].error.reason for h in range(1, 8)]
    assert reasons == ["", "", "", *["QUEUE_FULL"] * 4]
    assert gateway.clients[7].ends[0].error.retryable


async def test_stream_rules(world: World) -> None:
    """A stream without a gateway's id, and one that a newer stream of the same gateway replaces."""
    await start(world)
    nameless = world.stub.Serve()
    await nameless.write(scheduler_pb2.ServeRequest(cancels=[scheduler_pb2.Cancel(handle=1)]))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await nameless.read()
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    older = await world.gateway("same")
    await older.submit(submit(1, [1], 2000, ignore_eos=True))
    await until(lambda: bool(older.clients[1].outputs[0]))
    newer = await world.gateway("same")
    again = submit(1, [1], 30, ignore_eos=True)
    await newer.submit(again)
    await newer.done(1)
    assert_correct(newer, 1)
    await until(lambda: older.reading is not None and older.reading.done())
    assert older.call.code is not None
    assert await older.call.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_tokenizer_status_and_health(world: World) -> None:
    """K4: readiness by the standard health service; the tokenizer comes through from the executor."""
    await start(world)
    pieces = [
        piece.data
        async for piece in world.stub.GetTokenizer(scheduler_pb2.GetTokenizerRequest(tokenizer_fingerprint="t0"))
    ]
    assert b"".join(pieces) == BUNDLE
    with pytest.raises(grpc.aio.AioRpcError) as missing:
        async for _ in world.stub.GetTokenizer(scheduler_pb2.GetTokenizerRequest(tokenizer_fingerprint="t9")):
            pass
    assert missing.value.code() == grpc.StatusCode.NOT_FOUND
    gateway = await world.gateway()
    await gateway.submit(submit(1, [1] * 9, 4))
    await gateway.done(1)
    status = await world.stub.GetSchedulerStatus(scheduler_status_pb2.GetSchedulerStatusRequest())
    assert status.executors[0].connected
    assert status.executors[0].description.model.name == "m"
    assert status.executors[0].output_tokens_per_second > 0
    assert (status.running_count, status.waiting_count, status.gateway_count) == (0, 0, 1)
    assert status.kv.pools[0].executor_id == "e0"
    health = health_pb2_grpc.HealthStub(world.channel)
    for service in ("", "quire.v1.SchedulerService"):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_models_load_unload_and_reload(world: World) -> None:
    """F2: a reload under the same name computes with the new weights, never from the old ones' blocks."""
    free = describe(executor_id="e1")
    free.ClearField("model")
    await start(world, describe(executor_id="e0"), free)
    await until(lambda: all(e.connected for e in world.loop.state.executors))
    gateway = await world.gateway()

    async def manage(action: scheduler_pb2.ModelAction.ValueType, name: str, source: str = "") -> list[str]:
        answer = await world.stub.ManageModel(scheduler_pb2.ManageModelRequest(action=action, name=name, source=source))
        return [model.name for model in answer.models]

    with pytest.raises(grpc.aio.AioRpcError) as broken:
        await manage(scheduler_pb2.MODEL_ACTION_LOAD, "b", "broken")
    assert broken.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert await manage(scheduler_pb2.MODEL_ACTION_LOAD, "b", "here") == ["b", "m"]
    await until(lambda: [m.name for m in gateway.models] == ["b", "m"])
    with pytest.raises(grpc.aio.AioRpcError) as full:
        await manage(scheduler_pb2.MODEL_ACTION_LOAD, "c", "here")
    assert full.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    prompt = list(range(1, 34))
    await gateway.submit(submit(1, prompt, 5, model="b"))
    await gateway.done(1)
    assert await manage(scheduler_pb2.MODEL_ACTION_RELOAD, "b", "there") == ["b", "m"]
    await until(lambda: {m.fingerprint for m in gateway.models} == {"f0", "weights of there"})
    await gateway.submit(submit(2, prompt, 5, model="b"))
    await gateway.done(2)
    assert_correct(gateway, 1, 2)
    assert gateway.clients[2].started[0].cached_tokens == 0
    assert await manage(scheduler_pb2.MODEL_ACTION_UNLOAD, "b") == ["m"]
    await gateway.submit(submit(3, prompt, 5, model="b"), submit(4, prompt, 5))
    await gateway.done(3, 4)
    assert gateway.clients[3].ends[0].error.reason == "MODEL_NOT_FOUND"
    assert_correct(gateway, 4)


async def test_drain_finishes_what_runs(world: World) -> None:
    await start(world)
    gateway = await world.gateway()
    await gateway.submit(submit(1, [1], 80, ignore_eos=True))
    await until(lambda: bool(gateway.clients[1].outputs[0]))
    draining = asyncio.create_task(world.loop.drain())
    await until(lambda: not world.server.ready)
    await gateway.submit(submit(2, [1], 5))
    await gateway.done(1, 2)
    await asyncio.wait_for(draining, 5)
    assert_correct(gateway, 1)
    assert gateway.clients[2].ends[0].error.reason == "DRAINING"
