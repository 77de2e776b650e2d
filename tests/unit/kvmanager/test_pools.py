"""A pool with its index: what is retained, whose it is, what is counted, and what followers are told."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kvmanager.events import EventLog, ExecutorEvents
from services.kvmanager.pools import Pool
from services.kvmanager.retention import NO_RETENTION, Quota, Retention
from services.kvmanager.usage import NAMESPACE_LIMIT
from tests.unit.kvmanager.helpers import pool as spec


def key(*tokens: int) -> bytes:
    """Of a prefix of one-token blocks."""
    return bytes(tokens).ljust(32, b"\0")


def keys_of(tokens: Sequence[int]) -> list[bytes]:
    return [key(*tokens[: length + 1]) for length in range(len(tokens))]


def enter(pool: Pool, tokens: Sequence[int], namespace: str = "") -> list[int]:
    keys = keys_of(tokens)
    matched = pool.index.match(keys)
    blocks = pool.acquire(matched, len(tokens) - len(matched), namespace)
    for position in range(len(matched), len(tokens)):
        pool.settle(
            blocks[position], keys[position], keys[position - 1] if position else b"", bytes([tokens[position]])
        )
    return blocks


def serve(pool: Pool, tokens: Sequence[int], namespace: str = "", retention: Retention = NO_RETENTION) -> None:
    pool.release(enter(pool, tokens, namespace), keys_of(tokens), retention, len(tokens))


def test_retention_is_for_the_leading_blocks_asked_for() -> None:
    pool = Pool(spec(8))
    blocks = enter(pool, [1, 2, 3, 4])
    pool.release(blocks, keys_of([1, 2, 3, 4]), Retention(priority=50, pin_seconds=10.0), retained=2)
    assert pool.blocks.eviction_order() == [3, 2, 1, 0]
    assert pool.blocks.available_count == 6
    pool.pass_time(10.0)
    assert pool.blocks.available_count == 8
    serve(pool, [9])
    assert pool.blocks.eviction_order() == [3, 2, 4, 1, 0]


def test_pins_count_from_the_last_use() -> None:
    pool = Pool(spec(8))
    pool.pass_time(100.0)
    serve(pool, [1], retention=Retention(pin_seconds=10.0))
    pool.pass_time(105.0)
    serve(pool, [1], retention=Retention(pin_seconds=10.0))
    assert pool.blocks.policy.next_pin_end() == 115.0
    pool.pass_time(90.0)  # a clock that runs back changes nothing
    serve(pool, [2], retention=Retention(pin_seconds=1.0))
    assert pool.blocks.policy.next_pin_end() == 106.0


def test_a_twins_retention_goes_to_the_block_that_is_found() -> None:
    pool = Pool(spec(8))
    first, second = pool.acquire((), 1), pool.acquire((), 1)
    assert pool.settle(first[0], key(1))
    assert not pool.settle(second[0], key(1))
    pool.release(second, [key(1)], Retention(priority=9), retained=1)
    pool.release(first, [key(1)])
    serve(pool, [2])
    assert pool.blocks.eviction_order() == [second[0], first[0]]  # the second block was free again


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 2), min_size=1, max_size=5),
            st.sampled_from([0, 0, 10, 90]),
            st.sampled_from([0.0, 0.0, 2.0, 9.0]),
            st.sampled_from(["a", "b"]),
            st.integers(0, 3),
            st.integers(0, 6),
        ),
        max_size=40,
    )
)
def test_a_prefix_never_goes_before_its_cached_continuations(
    steps: list[tuple[list[int], int, float, str, int, int]],
) -> None:
    """Whatever was wanted for whom, with sequences that overlap, little room, pins over the limit and a quota."""
    pool = Pool(spec(12), {"a": Quota(share=0.25)})
    open_: list[tuple[list[int], list[int], Retention, int]] = []
    now = 0.0
    for tokens, priority, pin, namespace, closing, retained in steps:
        now += 1.0
        pool.pass_time(now)
        tokens = [ord(namespace), *tokens]
        matched = pool.index.match(keys_of(tokens))
        if pool.room_beside(matched) >= len(tokens) - len(matched):
            open_.append((tokens, enter(pool, tokens, namespace), Retention(priority, pin), retained))
        while len(open_) > closing:
            tokens, blocks, retention, retained = open_.pop(0)
            pool.release(blocks, keys_of(tokens), retention, retained)
        check_leaves_first(pool)


def check_leaves_first(pool: Pool) -> None:
    order = {block: place for place, block in enumerate(pool.blocks.eviction_order())}
    for known, block in pool.index.items():
        parent = pool.index.find(key(*known.rstrip(b"\0")[:-1]))
        if block in order and parent in order:
            assert order[block] < order[parent]


def namespace_of(pool: Pool, block: int) -> str:
    return next((name for name, owner in pool.namespaces.items() if owner == pool.blocks.owner(block)), "")


def test_namespaces_own_what_they_use_and_lose() -> None:
    pool = Pool(spec(4))
    serve(pool, [1, 2], "a")
    serve(pool, [3, 4, 5], "b")  # takes one of a's
    pool.count_lookup("a", 40, 0)
    pool.count_lookup("a", 40, 32, deepest=0)
    used = {name: (use.query_tokens, use.hit_tokens, use.evicted_count, count) for name, use, count in pool.uses()}
    assert used == {"a": (80, 32, 1, 1), "b": (0, 0, 0, 3)}
    assert [namespace_of(pool, block) for block in range(4)] == ["a", "b", "b", "b"]
    assert pool.evicted_count == 1


def test_restored_content_belongs_to_who_finds_it() -> None:
    pool = Pool(spec(4))
    pool.restore({2: key(1), 3: key(1, 2)})
    assert [count for _, _, count in pool.uses()] == []
    assert namespace_of(pool, 2) == ""
    serve(pool, [1], "a")
    assert [(name, count) for name, _, count in pool.uses()] == [("a", 1)]
    serve(pool, [5, 6, 7], "b")
    assert [(name, count) for name, _, count in pool.uses()] == [("a", 1), ("b", 3)]


def test_what_a_namespace_has_pinned_stays_within_its_quota_but_for_the_last_prompt() -> None:
    pool = Pool(spec(20), {"a": Quota(share=0.1)})
    for tokens in ([1], [2, 3], [4], [5, 6]):
        serve(pool, tokens, "a", Retention(pin_seconds=10.0))
    assert pool.blocks.policy.pinned_count == 3
    serve(pool, [7, 8], "b", Retention(pin_seconds=10.0))
    assert pool.blocks.policy.pinned_count == 5


def test_a_quota_in_bytes_needs_the_size_of_a_block() -> None:
    pool = Pool(spec(4), {"a": Quota(size=10)})
    with pytest.raises(ValueError, match="size of its blocks"):
        pool.acquire((), 1, "a")


def test_namespaces_without_blocks_are_forgotten_and_their_counts_kept() -> None:
    pool = Pool(spec(2), {"0": Quota(share=1.0)})
    for number in range(NAMESPACE_LIMIT + 1):
        pool.count_lookup(str(number), 3, 1)
        serve(pool, [number % 200], str(number))
    names = [name for name, _, _ in pool.uses()]
    assert len(names) < 10
    assert names[-1] == str(NAMESPACE_LIMIT)
    total = sum(use.query_tokens for _, use, _ in pool.uses()) + pool.namespaces.others.query_tokens
    assert total == 3 * (NAMESPACE_LIMIT + 1)
    assert (
        pool.namespaces.others.evicted_count + sum(use.evicted_count for _, use, _ in pool.uses()) == pool.evicted_count
    )


def test_how_long_blocks_live_wait_and_come_back() -> None:
    pool = Pool(spec(2))
    pool.pass_time(10.0)
    blocks = enter(pool, [1])
    pool.pass_time(13.0)
    pool.release(blocks, keys_of([1]))
    pool.pass_time(20.0)
    pool.count_lookup("", 2, 1, deepest=blocks[0])
    pool.pass_time(40.0)
    serve(pool, [2, 3])
    times = pool.times
    assert (times.lifetime.total, times.idle_before_eviction.total, times.reuse_gap.total) == (30.0, 27.0, 7.0)
    counts = dict(times.lifetime.cumulative())
    assert (counts["20.0"], counts["50.0"], counts["+Inf"]) == (0, 1, 1)
    assert dict(times.reuse_gap.cumulative())["10.0"] == 1


def test_followers_hear_of_all_that_comes_and_goes() -> None:
    log = EventLog(100)
    pool = Pool(spec(2), events=ExecutorEvents(log, "e"))
    serve(pool, [1, 2])
    log.commit(5)
    serve(pool, [3])
    log.commit(6)
    pool.discard(pool.index.find(key(1)) or 0)
    pool.keep_only({})
    log.commit(7)
    stored, evicted, discarded = log.read(1, 10)
    assert [(event.key, event.parent, event.tokens) for event in stored.stored] == [
        (key(1), b"", b"\x01"),
        (key(1, 2), key(1), b"\x02"),
    ]
    assert ([event.key for event in evicted.removed], [event.key for event in evicted.stored]) == (
        [key(1, 2)],
        [key(3)],
    )
    assert [event.key for event in discarded.removed] == [key(1), key(3)]
    assert all(event.pool is pool.spec for event in (*stored.stored, *evicted.removed))


def test_a_twin_and_a_held_block_say_nothing() -> None:
    log = EventLog(100)
    pool = Pool(spec(4), events=ExecutorEvents(log, "e"))
    first, second = pool.acquire((), 2)
    pool.settle(first, key(1))
    pool.settle(second, key(1))
    pool.discard(first)
    log.commit(1)
    (batch,) = log.read(1, 10)
    assert ([event.key for event in batch.stored], batch.removed) == ([key(1)], [])


def test_restored_content_is_stored_without_tokens() -> None:
    log = EventLog(100)
    Pool(spec(2), events=ExecutorEvents(log, "e")).restore({1: key(1)})
    log.commit(1)
    (batch,) = log.read(1, 10)
    assert [(event.key, event.parent, event.tokens) for event in batch.stored] == [(key(1), b"", b"")]
