"""The log of events: numbers without gaps, order within a batch, bounds; and its followers."""

from __future__ import annotations

import asyncio
from array import array

import pytest

from services.common.errors import QuireError, Reason
from services.kvmanager.event_feed import EventFeed, write_batch
from services.kvmanager.events import BATCH_LIMIT, EventBatch, EventLog, ExecutorEvents, Lost
from tests.unit.kvmanager.helpers import pool

SPEC = pool(8, size=2, pool_id=3)


def stored(events: ExecutorEvents, *names: str) -> None:
    for name in names:
        events.stored(SPEC, name.encode(), b"parent", array("i", [1, 2]).tobytes(), "")


def removed(events: ExecutorEvents, *names: str) -> None:
    for name in names:
        events.removed(SPEC, name.encode())


def told(batch: EventBatch) -> tuple[int, str, bool, list[str], list[str]]:
    return (
        batch.number,
        batch.executor_id,
        batch.cleared,
        [event.key.decode() for event in batch.removed],
        [event.key.decode() for event in batch.stored],
    )


def test_batches_are_numbered_without_gaps() -> None:
    log = EventLog(100)
    one, two = ExecutorEvents(log, "one"), ExecutorEvents(log, "two")
    assert not log.commit(1)
    stored(one, "a", "b")
    assert log.commit(1)
    stored(two, "c")
    removed(one, "a")
    stored(one, "d")
    assert log.commit(2)
    assert not log.commit(3)
    assert [told(batch) for batch in log.read(1, 10)] == [
        (1, "one", False, [], ["a", "b"]),
        (2, "two", False, [], ["c"]),
        (3, "one", False, ["a"], ["d"]),
    ]
    assert [batch.timestamp_ms for batch in log.read(1, 10)] == [1, 2, 2]
    assert (log.oldest_number, log.next_number) == (1, 4)


def test_what_comes_after_in_time_comes_after_in_the_log() -> None:
    """Readers drop what was removed before they take what was stored: a later removal needs a batch of its own."""
    log = EventLog(100)
    events = ExecutorEvents(log, "e")
    stored(events, "a")
    removed(events, "a")
    stored(events, "a")
    events.cleared()
    stored(events, "b")
    log.commit(1)
    assert [told(batch)[2:] for batch in log.read(1, 10)] == [
        (False, [], ["a"]),
        (False, ["a"], ["a"]),
        (True, [], ["b"]),
    ]


def test_large_batches_are_split() -> None:
    log = EventLog(10 * BATCH_LIMIT)
    stored(ExecutorEvents(log, "e"), *map(str, range(BATCH_LIMIT + 1)))
    log.commit(1)
    assert [len(batch.stored) for batch in log.read(1, 10)] == [BATCH_LIMIT, 1]


def test_old_batches_are_dropped_and_asking_for_them_is_refused() -> None:
    log = EventLog(6)
    events = ExecutorEvents(log, "e")
    for number in range(5):
        stored(events, str(number))  # a batch counts as one more
        log.commit(number)
    assert (log.oldest_number, log.next_number) == (3, 6)
    assert [batch.number for batch in log.read(3, 2)] == [3, 4]
    assert log.read(6, 10) == []
    for number in (0, 2, 7):
        with pytest.raises(Lost, match=f"batch {number} is not kept; the oldest is 3, the next 6"):
            log.read(number, 1)


def test_a_batch_larger_than_the_log_is_kept_alone() -> None:
    log = EventLog(2)
    stored(ExecutorEvents(log, "e"), "a", "b", "c")
    log.commit(1)
    assert [batch.number for batch in log.read(1, 1)] == [1]
    stored(ExecutorEvents(log, "e"), "d")
    log.commit(2)
    assert log.oldest_number == 2


async def test_a_follower_gets_the_past_asked_for_and_all_that_comes() -> None:
    log = EventLog(100)
    feed, events = EventFeed(log), ExecutorEvents(log, "e")
    for name in "abc":
        stored(events, name)
        feed.publish(1)
    follower, fresh = feed.follow(2), feed.follow(0)
    assert [(await anext(follower)).number for _ in range(2)] == [2, 3]
    waiting = [asyncio.ensure_future(anext(each)) for each in (follower, fresh)]
    await asyncio.sleep(0)
    feed.publish(2)  # nothing was written
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    stored(events, "d")
    feed.publish(3)
    assert [(await task).number for task in waiting] == [4, 4]


@pytest.mark.parametrize("start", [1, 6])
async def test_a_start_that_is_not_kept_is_out_of_range(start: int) -> None:
    log = EventLog(5)
    feed, events = EventFeed(log), ExecutorEvents(log, "e")
    for name in "abcd":
        stored(events, name)
        feed.publish(1)
    with pytest.raises(QuireError, match=f"batch {start} is not kept; the oldest is 3, the next 5") as raised:
        await anext(feed.follow(start))
    assert raised.value.reason == Reason.OUT_OF_RANGE


async def test_a_follower_that_was_overtaken_is_ended() -> None:
    log = EventLog(5)
    feed, events = EventFeed(log), ExecutorEvents(log, "e")
    stored(events, "a")
    feed.publish(1)
    slow, quick = feed.follow(1), feed.follow(1)
    assert (await anext(slow)).number == (await anext(quick)).number == 1
    for name in "bcde":
        stored(events, name)
        feed.publish(1)
        assert (await anext(quick)).stored[0].key == name.encode()
    with pytest.raises(QuireError, match="batch 2 is not kept") as raised:
        await anext(slow)
    assert raised.value.reason == Reason.SLOW_READER


async def test_followers_end_with_the_services_status_after_what_was_published() -> None:
    log = EventLog(100)
    feed = EventFeed(log)
    follower, idle = feed.follow(0), feed.follow(0)
    first, second = asyncio.ensure_future(anext(follower)), asyncio.ensure_future(anext(idle))
    await asyncio.sleep(0)
    stored(ExecutorEvents(log, "e"), "a")
    feed.publish(1)
    feed.close(QuireError(Reason.DRAINING, "stopping"))
    assert (await first).number == (await second).number == 1
    with pytest.raises(QuireError, match="stopping"):
        await anext(follower)
    with pytest.raises(QuireError, match="stopping"):
        await anext(feed.follow(0))


def test_a_batch_on_the_wire() -> None:
    log = EventLog(100)
    events = ExecutorEvents(log, "e")
    events.cleared()
    removed(events, "a")
    stored(events, "b")
    log.commit(17)
    message = write_batch(log.read(1, 1)[0])
    assert (message.sequence_number, message.timestamp_ms, message.executor_id, message.cleared) == (1, 17, "e", True)
    (gone,), (come,) = message.removed, message.stored
    assert (gone.key, gone.tier, gone.pool_id) == (b"a", SPEC.tier, 3)
    assert (come.key, come.parent_key, list(come.token_ids), come.block_size) == (b"b", b"parent", [1, 2], 2)
    assert (come.tier, come.pool_id, come.adapter) == (SPEC.tier, 3, "")


def test_a_log_keeps_something() -> None:
    with pytest.raises(ValueError, match="at least one"):
        EventLog(0)
