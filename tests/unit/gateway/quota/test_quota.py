"""What is let in, held and given back, without a gateway around it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import pytest

from services.common.errors import QuireError, Reason
from services.common.store import Store, StoreLost
from services.gateway.caller import Caller
from services.gateway.quota.headers import rate_headers
from services.gateway.quota.ledger import Levels, Verdict
from services.gateway.quota.limits import NO_CAPS, Caps, Rates, Subject, strictest
from services.gateway.quota.memory_ledger import MemoryLedger
from services.gateway.quota.quota import Quota
from services.gateway.quota.usage import KEPT_DAYS, MemoryUsage, RedisUsage, Row
from tests.fixtures.redis_server import RedisServer

TENANT = Subject("acme", "", Rates(requests_per_minute=60, tokens_per_minute=600))
KEY = Subject("acme", "k", Rates(requests_per_minute=30))
CALLER = Caller("acme", "k", counted=(TENANT, KEY))


class Lost(MemoryLedger):
    """Cannot be reached."""

    async def take(self, grant: str, subjects: Sequence[Subject], tokens: int) -> Verdict:
        raise StoreLost("gone")


class Slow(MemoryLedger):
    """Lets in, and answers only when told."""

    def __init__(self) -> None:
        super().__init__()
        self.taken, self.answer = asyncio.Event(), asyncio.Event()

    async def take(self, grant: str, subjects: Sequence[Subject], tokens: int) -> Verdict:
        verdict = await super().take(grant, subjects, tokens)
        self.taken.set()
        await self.answer.wait()
        return verdict


def test_caps_are_the_strictest_of_tenant_and_key() -> None:
    one = Caps(100, None, frozenset({"a", "b"}), 0.5)
    other = Caps(None, 20, frozenset({"b", "c"}), 0.25)
    assert strictest((one, other)) == Caps(100, 20, frozenset({"b"}), 0.25)
    assert strictest((NO_CAPS, NO_CAPS)) == NO_CAPS
    assert [NO_CAPS.context(64), one.context(64), one.context(640)] == [64, 64, 100]


def test_headers_tell_of_the_subject_that_has_least_left() -> None:
    headers = rate_headers((TENANT, KEY), (Levels(40 * 60_000 + 1, -5), Levels(29 * 60_000, 0)))
    assert headers == {
        "x-ratelimit-limit-requests": "30",
        "x-ratelimit-remaining-requests": "29",
        "x-ratelimit-reset-requests": "2.000s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "60.001s",
    }


async def test_whom_nothing_is_counted_for_costs_nothing() -> None:
    quota = Quota(Lost(), MemoryUsage(), "closed")
    grant = await quota.enter(Caller("free"), 10**9)
    assert grant.headers == {}
    quota.settle(grant, 5)


@pytest.mark.parametrize("when_lost", ["open", "closed"])
async def test_a_lost_store_is_as_it_is_set(when_lost: str) -> None:
    refused: list[str] = []
    quota = Quota(Lost(), MemoryUsage(), when_lost, refused.append)  # type: ignore[arg-type]
    if when_lost == "closed":
        with pytest.raises(QuireError) as caught:
            await quota.enter(CALLER)
        assert (caught.value.reason, caught.value.retry_after) == (Reason.STORE_LOST, 1.0)
        assert refused == ["store_lost"]
        return
    for _ in range(30):
        await quota.enter(CALLER)
    with pytest.raises(QuireError, match="requests_per_minute: the limit of key k"):
        await quota.enter(CALLER)
    assert refused == ["requests_per_minute"]


async def test_who_comes_too_early_is_not_even_looked_at() -> None:
    quota = Quota(MemoryLedger(), MemoryUsage())
    quota.check_pace(CALLER)
    for _ in range(30):
        await quota.enter(CALLER)
    quota.check_pace(CALLER)
    with pytest.raises(QuireError):
        await quota.enter(CALLER)
    with pytest.raises(QuireError) as caught:
        quota.check_pace(CALLER)
    assert caught.value.reason is Reason.RATE_LIMITED
    assert caught.value.retry_after is not None
    assert 0 < caught.value.retry_after <= 2
    quota.check_pace(Caller("acme", "other", counted=(TENANT,)))


async def test_a_request_that_is_given_up_while_it_comes_in_holds_nothing() -> None:
    ledger = Slow()
    quota = Quota(ledger, MemoryUsage())
    caller = Caller("acme", counted=(Subject("acme", "", Rates(concurrent_requests=1)),))
    entering = asyncio.ensure_future(quota.enter(caller))
    await ledger.taken.wait()
    entering.cancel()
    await asyncio.wait([entering])
    ledger.answer.set()
    await quota.stop()
    await quota.enter(caller)


def row(day: date, tenant: str, requests: int, tokens: tuple[int, int, int]) -> Row:
    return Row(day, tenant, "m/x", requests, *tokens)


async def test_usage_in_memory_is_kept_by_day() -> None:
    day = date(2026, 1, 1)
    usage = MemoryUsage(lambda: day)
    usage.count("a", "m/x", 10, 4, 2)
    usage.count("a", "m/x", 10, 0, 3)
    usage.count("b", "m/x", 1, 0, 1)
    day = date(2026, 1, 2)
    usage.count("a", "m/x", 5, 0, 0)
    first = [row(date(2026, 1, 1), "a", 2, (20, 4, 5)), row(date(2026, 1, 1), "b", 1, (1, 0, 1))]
    assert await usage.read(date(2025, 1, 1), day) == [*first, row(day, "a", 1, (5, 0, 0))]
    assert await usage.read(date(2026, 1, 1), date(2026, 1, 1)) == first
    day = date.fromordinal(date(2026, 1, 1).toordinal() + KEPT_DAYS)
    usage.count("a", "m/x", 1, 0, 0)
    assert [one.day for one in await usage.read(date(2025, 1, 1), day)] == [date(2026, 1, 2), day]


async def test_usage_in_redis_counts_each_batch_once(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    stores = [Store(server.url, 60) for _ in range(2)]
    day = date(2026, 1, 1)
    books = [RedisUsage(store, lambda: day) for store in stores]
    try:
        for book in books:
            book.count("a", "m/x", 10, 4, 2)
            await book.flush()
        books[0].count("a", "m/x", 1, 0, 1)
        sending, lost = books[0]._send, False

        async def send(*arguments: object) -> None:
            """Redis did it, and its answer is lost."""
            nonlocal lost
            await sending(*arguments)  # type: ignore[arg-type]
            if not lost:
                lost = True
                raise ConnectionError("lost")

        books[0]._send = send  # type: ignore[method-assign]
        with pytest.raises(StoreLost):
            await books[0].flush()
        books[0].count("b", "m/x", 7, 0, 7)  # goes with the next batch
        stores[0]._silent_until = 0
        await books[0].flush()
        await books[0].flush()
        found = await books[1].read(date(2025, 12, 31), day)
        assert found == [row(day, "a", 3, (21, 8, 5)), row(day, "b", 1, (7, 0, 7))]
    finally:
        for store in stores:
            await store.close()
        server.kill()
