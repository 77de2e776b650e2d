"""A scheduler's stream: answers, refusals, fencing, and news of space."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from quire.v1 import executor_pb2, kvmanager_pb2
from services.common.errors import QuireError, Reason, from_rpc_error
from tests.contract.kvmanager.conftest import (
    LEASE_SECONDS,
    WAIT,
    Executor,
    Scheduler,
    description,
    reservation,
    sealed,
    status,
    until_available,
)

GRANTED = kvmanager_pb2.RESERVATION_OUTCOME_GRANTED
INVALID = kvmanager_pb2.RESERVATION_OUTCOME_INVALID
NO_BLOCKS = kvmanager_pb2.RESERVATION_OUTCOME_NO_BLOCKS
NEVER_FITS = kvmanager_pb2.RESERVATION_OUTCOME_NEVER_FITS
NO_EXECUTOR = kvmanager_pb2.RESERVATION_OUTCOME_NO_EXECUTOR


@pytest.fixture
async def executor(stub: Any) -> Executor:
    made = Executor(stub)
    await made.register()
    return made


def space(response: kvmanager_pb2.ReserveResponse) -> list[tuple[str, int, int]]:
    return [(s.executor_id, s.available_block_count, s.total_block_count) for s in response.space]


async def drain(call: Any) -> None:
    while await asyncio.wait_for(call.read(), WAIT) is not grpc.aio.EOF:
        pass


async def failure(call: Any) -> QuireError:
    """Why the service ended a stream; fails where it ended well."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drain(call)
    return from_rpc_error(caught.value, Reason.KVMANAGER_LOST)


async def test_the_welcome_states_lease_and_space(stub: Any, executor: Executor) -> None:
    welcome = await Scheduler(stub).hello()
    assert welcome.lease_ms == LEASE_SECONDS * 1000
    assert space(welcome) == [("e", 8, 8)]


async def test_a_sequences_life(stub: Any, scheduler: Scheduler) -> None:
    response = await scheduler.ask(reservations=[reservation(1, range(6), lookahead_tokens=3)])
    (granted,) = response.reservations
    assert (granted.sequence_id, granted.outcome, granted.executor_id, granted.node) == (1, GRANTED, "e", -1)
    assert [(group.group_id, list(group.block_ids)) for group in granted.blocks] == [(0, [0, 1, 2])]
    assert (granted.cached_tokens, granted.format) == (0, 2)
    assert granted.reasons
    assert space(response) == [("e", 5, 8)]

    progress = kvmanager_pb2.SequenceProgress(sequence_id=1, computed_length=6, token_ids=[50])
    response = await scheduler.ask(progress=[progress], extend_sequence_ids=[1], extend_token_counts=[13])
    assert [(block.block_id, block.group_id, len(block.key)) for block in sealed(response)] == [(0, 0, 32)]
    (extension,) = response.extensions
    assert (extension.outcome, list(extension.blocks[0].block_ids)) == (GRANTED, [3])
    assert (await status(stub)).sequence_count == 1

    assert space(await scheduler.ask(released_sequence_ids=[1])) == [("e", 8, 8)]
    again = await scheduler.reserve(2, range(6))
    assert (again.cached_tokens, list(again.blocks[0].block_ids)) == (4, [0, 1])
    assert (again.tier, again.cached_state) == (1, kvmanager_pb2.BLOCK_STATE_READY)
    found = await status(stub)
    assert (found.prefix_query_tokens, found.prefix_hit_tokens, found.sequence_count) == (12, 4, 1)
    (pool,) = found.pools
    assert (pool.free_count, pool.cached_count, pool.leased_count, pool.pool.block_count) == (6, 0, 2, 8)


async def test_fields_apply_in_order_so_a_release_makes_room_in_the_same_message(scheduler: Scheduler) -> None:
    assert (await scheduler.reserve(1, range(32))).outcome == GRANTED
    assert (await scheduler.reserve(2, range(32))).outcome == NO_BLOCKS
    response = await scheduler.ask(released_sequence_ids=[1], reservations=[reservation(2, range(32))])
    assert response.reservations[0].outcome == GRANTED
    assert space(response) == [("e", 0, 8)]


async def test_answers_keep_order_and_silence_has_none(scheduler: Scheduler) -> None:
    await scheduler.tell(reservations=[reservation(n, [n]) for n in (1, 2)])
    await scheduler.tell(progress=[kvmanager_pb2.SequenceProgress(sequence_id=1, computed_length=1)])  # says nothing
    await scheduler.tell()
    await scheduler.tell(reservations=[reservation(3, range(100)), reservation(4, [4])])
    assert [r.sequence_id for r in (await scheduler.read()).reservations] == [1, 2]
    assert [(r.sequence_id, r.outcome) for r in (await scheduler.read()).reservations] == [
        (3, NEVER_FITS),
        (4, GRANTED),
    ]


async def test_malformed_and_repeated_parts_change_nothing(
    stub: Any, scheduler: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    await scheduler.reserve(1, range(6))
    before = (await status(stub)).pools[0]
    caplog.set_level(logging.WARNING)
    response = await scheduler.ask(
        released_sequence_ids=[7],
        progress=[
            kvmanager_pb2.SequenceProgress(sequence_id=7, computed_length=1),
            kvmanager_pb2.SequenceProgress(sequence_id=1, computed_length=-1),
        ],
        extend_sequence_ids=[1, 7],
        extend_token_counts=[1, 8],
        reservations=[
            reservation(1, range(6)),
            reservation(2, [1, -1]),
            reservation(3, [1], adapter="lora"),
            reservation(4, [1], kv_policy="int4"),
            reservation(5, [1], executor="nobody"),
        ],
    )
    assert [e.outcome for e in response.extensions] == [GRANTED, INVALID]
    assert [r.outcome for r in response.reservations] == [INVALID] * 4 + [NO_EXECUTOR]
    assert [r.reasons[0].split(":")[0] for r in response.reservations[:4]] == [
        "sequence_id",
        "token_ids",
        "adapter",
        "kv_policy",
    ]
    assert space(response) == []
    assert (await status(stub)).pools[0] == before
    assert [record.getMessage() for record in caplog.records] == [
        "release refused",
        "progress refused",
        "progress refused",
        "extension refused",
        *["reservation refused"] * 4,
    ]


async def test_extensions_without_counts_are_invalid(scheduler: Scheduler) -> None:
    await scheduler.reserve(1, range(4))
    response = await scheduler.ask(extend_sequence_ids=[1, 1], extend_token_counts=[8])
    assert [e.outcome for e in response.extensions] == [INVALID, INVALID]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, Reason.PROTOCOL),
        ({"hello": kvmanager_pb2.ReserveHello()}, Reason.INVALID_FIELD),
    ],
)
async def test_bad_hellos_end_the_stream(stub: Any, fields: dict[str, Any], reason: Reason) -> None:
    scheduler = Scheduler(stub)
    await scheduler.tell(**fields)
    error = await failure(scheduler.call)
    assert error.reason == reason
    assert error.message.startswith("hello")


async def test_a_second_hello_ends_the_stream(scheduler: Scheduler) -> None:
    await scheduler.tell(hello=kvmanager_pb2.ReserveHello(scheduler_id="s"))
    assert (await failure(scheduler.call)).reason == Reason.PROTOCOL


async def test_a_second_stream_of_a_scheduler_fences_the_first(stub: Any, scheduler: Scheduler) -> None:
    await scheduler.reserve(1, range(8))
    newer = Scheduler(stub)
    assert space(await newer.hello()) == [("e", 6, 8)]
    assert (await failure(scheduler.call)).reason == Reason.STALE_EPOCH
    granted = await newer.reserve(1, range(8))  # its ids are its own
    assert list(granted.blocks[0].block_ids) == [2, 3]
    assert (await status(stub)).sequence_count == 2


async def test_d2_a_lost_schedulers_blocks_return_after_lease_and_closed_epoch(
    stub: Any, executor: Executor, scheduler: Scheduler
) -> None:
    """D2: held while the executor may write, reclaimed after, late confirmations ignored; others hear of the room."""
    other = Scheduler(stub, "other")
    await other.hello()
    await scheduler.reserve(1, range(32))
    assert (await other.reserve(1, range(8))).outcome == NO_BLOCKS
    scheduler.call.cancel()
    await asyncio.sleep(LEASE_SECONDS + 0.2)
    assert (await status(stub)).pools[0].leased_count == 8
    assert await executor.ask(epoch=2, closed_epochs=[1]) == 2
    await until_available(other, 8)
    assert await executor.ask(epoch=2, closed_epochs=[1]) == 2
    assert await executor.ask(epoch=2, closed_epochs=[900]) == 2
    assert await executor.ask(epoch=2, done_operation_ids=[4]) == 2
    assert (await other.reserve(1, range(8), epoch=2)).outcome == GRANTED
    assert (await status(stub)).sequence_count == 1


async def test_d2_a_closed_epoch_waits_for_the_lease(stub: Any, executor: Executor, scheduler: Scheduler) -> None:
    """D2: the lease ends by itself; nothing else needs to happen."""
    other = Scheduler(stub, "other")
    await other.hello()
    await scheduler.reserve(1, range(8))
    scheduler.call.cancel()
    await executor.ask(epoch=2, closed_epochs=[1])
    assert (await status(stub)).pools[0].leased_count == 2
    await until_available(other, 8)


async def test_a_waiting_scheduler_hears_of_an_executor(stub: Any) -> None:
    scheduler = Scheduler(stub)
    assert space(await scheduler.hello()) == []
    assert (await scheduler.reserve(1, range(8))).outcome == NO_EXECUTOR
    executor = Executor(stub)
    await executor.register(description(blocks=5))
    assert space(await scheduler.read()) == [("e", 5, 5)]
    await executor.register(description(blocks=9, model="b" * 64))
    assert space(await scheduler.read()) == [("e", 9, 9)]
    assert (await scheduler.reserve(1, range(8))).outcome == NO_EXECUTOR
    assert (await scheduler.reserve(1, range(8), model_fingerprint="b" * 64)).outcome == GRANTED


async def test_many_schedulers_at_once_lose_nothing(stub: Any, executor: Executor) -> None:
    """F6: a small pool, shared prefixes and distinct tails, streams that break off; no block has two owners."""

    async def serve(number: int) -> None:
        scheduler = Scheduler(stub, f"s{number}")
        await scheduler.hello()
        for turn in range(1, 12):
            tail = [100 * number + turn] * 4
            await scheduler.tell(reservations=[reservation(turn, [1, 2, 3, 4, *tail])])
            while not (response := await scheduler.read()).reservations:
                pass
            if response.reservations[0].outcome == GRANTED:
                if turn == 11:
                    break
                progress = kvmanager_pb2.SequenceProgress(sequence_id=turn, computed_length=8)
                await scheduler.tell(progress=[progress])
                await scheduler.tell(released_sequence_ids=[turn])
        scheduler.call.cancel()

    await asyncio.gather(*(serve(number) for number in range(8)))
    await executor.ask(epoch=2, closed_epochs=[1])
    watcher = Scheduler(stub, "watcher")
    if space(await watcher.hello()) != [("e", 8, 8)]:
        await until_available(watcher, 8)
    assert (await status(stub)).sequence_count == 0


async def test_f7_a_restarted_executor_finds_its_blocks_by_their_keys(
    stub: Any, executor: Executor, scheduler: Scheduler
) -> None:
    """F7, F2: keys that came from this process work in any other, for the same model only."""
    await scheduler.reserve(1, range(8))
    response = await scheduler.ask(progress=[kvmanager_pb2.SequenceProgress(sequence_id=1, computed_length=8)])
    blocks = [executor_pb2.SealedBlock(block_id=b.block_id + 3, key=b.key) for b in sealed(response)]
    copy = Executor(stub, "copy")
    await copy.register(inventory=blocks)
    await scheduler.read()  # the copy's space
    hit = await scheduler.reserve(2, range(9), executor="copy")
    assert (hit.cached_tokens, list(hit.blocks[0].block_ids)) == (8, [3, 4, 0])
    stranger = await scheduler.reserve(3, range(9), executor="copy", namespace="other")
    assert stranger.cached_tokens == 0


async def test_metrics(stub: Any, executor: Executor, scheduler: Scheduler, registry: CollectorRegistry) -> None:
    await scheduler.reserve(1, range(6))
    await scheduler.ask(progress=[kvmanager_pb2.SequenceProgress(sequence_id=1, computed_length=6)])
    await scheduler.reserve(2, range(6))
    await scheduler.ask(released_sequence_ids=[1])
    await scheduler.reserve(3, [-1])
    await scheduler.reserve(4, range(100))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert [value("quire_kv_blocks", executor="e", state=state) for state in ("free", "cached", "leased")] == [6, 0, 2]
    assert value("quire_kv_reservations_total", outcome="granted") == 2
    assert value("quire_kv_reservations_total", outcome="invalid") == 1
    assert value("quire_kv_reservations_total", outcome="never_fits") == 1
    assert value("quire_kv_prefix_query_tokens_total") == 12
    assert value("quire_kv_prefix_hit_tokens_total") == 4
    assert value("quire_kv_evictions_total") == 0
    assert value("quire_kv_violations") == 0
