"""A gateway takes requests over from another one, over real streams."""

from __future__ import annotations

from pathlib import Path

from quire.v1 import scheduler_pb2
from tests.contract.scheduler.peers import World, until
from tests.contract.scheduler.test_serve import assert_correct, start
from tests.unit.scheduler.sim import Client, submit
from tests.unit.scheduler.sim_executor import describe


async def test_another_gateway_takes_over(tmp_path: Path) -> None:
    """The first one is gone, or still there: nothing is computed twice, and no token lost."""
    world = World(tmp_path, describe(blocks=1100))
    await world.start_kvmanager()
    try:
        await _take_over(world)
    finally:
        await world.close()


async def _take_over(world: World) -> None:
    await start(world)
    world.executors[0].step_seconds = 0.01
    first = await world.gateway("g1")
    await first.submit(*(submit(h, [h] * 30, 60, ignore_eos=True, keep_ms=20_000) for h in (1, 2)))
    await until(lambda: all(len(first.clients[h].outputs[0]) >= 3 for h in (1, 2)))
    second = await world.gateway("g2")

    async def take_over(handle: int, position: int) -> None:
        known = first.clients[handle].outputs[0][:position]
        second.clients[handle + 10] = Client(first.clients[handle].submit, {0: known})
        asked = scheduler_pb2.Attach(
            handle=handle + 10, tenant="default", request_id=f"r{handle}", next_positions=[position]
        )
        await second.send(attaches=[asked])

    await take_over(2, 2)
    await until(lambda: bool(first.clients[2].ends))
    assert first.clients[2].ends[0].error.reason == "TAKEN_OVER"
    await first.close()
    await take_over(1, 1)
    await second.done(11, 12)
    assert_correct(second, 11, 12)
    assert world.loop.state.executors[0].counters.prompt_tokens == 60
    await world.assert_no_blocks_held()
