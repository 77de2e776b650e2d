"""Both ledgers by one set of tests: in memory, and in a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.common.store import Store
from services.gateway.quota.bucket import TICKS, full, refilled, wait_ms
from services.gateway.quota.ledger import LEASE_MS, PLACE_WAIT_MS, Ledger
from services.gateway.quota.limits import Rates, Subject
from services.gateway.quota.memory_ledger import MemoryLedger
from services.gateway.quota.redis_ledger import RedisLedger
from tests.fixtures.redis_server import RedisServer

TENANT, KEY = ("acme", ""), ("acme", "k")


def subject(name: tuple[str, str] = TENANT, **rates: int) -> Subject:
    return Subject(*name, Rates(**rates))


@pytest.fixture
def server(tmp_path: Path) -> Any:
    redis = RedisServer(tmp_path)
    redis.start()
    yield redis
    redis.kill()


@pytest.fixture(params=["memory", "redis"])
async def ledgers(request: pytest.FixtureRequest) -> AsyncIterator[list[Ledger]]:
    """As many gateways as there may be with one count."""
    if request.param == "memory":
        yield [MemoryLedger()]
        return
    url = request.getfixturevalue("server").url
    stores = [Store(url, 60) for _ in range(4)]
    yield [RedisLedger(store) for store in stores]
    for store in stores:
        await store.close()


async def admitted(ledgers: list[Ledger], callers: int, subjects: list[Subject], tokens: int) -> list[str]:
    """The grants of parallel callers, spread over the gateways, that were let in."""
    names = [f"g{n}" for n in range(callers)]
    takes = [ledgers[n % len(ledgers)].take(name, subjects, tokens) for n, name in enumerate(names)]
    verdicts = await asyncio.gather(*takes)
    return [name for name, verdict in zip(names, verdicts, strict=True) if verdict.refusal is None]


@pytest.mark.parametrize(
    ("rates", "tokens", "most"),
    [
        ({"requests_per_minute": 7}, 0, 7),
        ({"tokens_per_minute": 100}, 9, 11),
        ({"concurrent_requests": 5}, 1, 5),
        ({"requests_per_minute": 9, "tokens_per_minute": 100, "concurrent_requests": 8}, 9, 8),
    ],
)
async def test_fifty_parallel_callers_never_exceed_a_limit(
    ledgers: list[Ledger], rates: dict[str, int], tokens: int, most: int
) -> None:
    before = asyncio.get_running_loop().time()
    inside = await admitted(ledgers, 50, [subject(**rates), subject(KEY, requests_per_minute=40)], tokens)
    seconds = asyncio.get_running_loop().time() - before
    refilled_units = (
        int(seconds * max(rates.values()) / 60 / max(tokens, 1)) if "concurrent_requests" not in rates else 0
    )
    assert most <= len(inside) <= most + refilled_units


async def test_nothing_is_taken_unless_all_subjects_agree(ledgers: list[Ledger]) -> None:
    tenant, key = subject(requests_per_minute=100, tokens_per_minute=100), subject(KEY, requests_per_minute=2)
    assert len(await admitted(ledgers, 10, [tenant, key], 10)) == 2
    verdict = await ledgers[0].take("late", [tenant, key], 10)
    assert verdict.refusal is not None
    assert (verdict.refusal.subject, verdict.refusal.limit) == (key, "requests_per_minute")
    assert 20_000 < verdict.refusal.wait_ms <= 30_000
    assert 97 < verdict.levels[0].requests / TICKS <= 99
    assert 79 < verdict.levels[0].tokens / TICKS <= 82
    await ledgers[-1].settle("late", [tenant, key], 1000)  # it never came in: nothing to charge
    again = await ledgers[0].take("other", [tenant], 10)
    assert again.levels[0].tokens >= 69 * TICKS


async def test_a_place_is_given_back_once(ledgers: list[Ledger]) -> None:
    one = [subject(concurrent_requests=1)]
    first, last = ledgers[0], ledgers[-1]
    assert (await first.take("a", one, 0)).refusal is None
    refused = (await last.take("b", one, 0)).refusal
    assert refused is not None
    assert (refused.limit, refused.wait_ms) == ("concurrent_requests", PLACE_WAIT_MS)
    await last.settle("a", one, 0)
    assert (await last.take("b", one, 0)).refusal is None
    await first.settle("a", one, 0)
    assert (await first.take("c", one, 0)).refusal is not None, "settling twice gave two places back"


async def test_what_was_held_is_settled_by_what_was_used(ledgers: list[Ledger]) -> None:
    """An estimate is held; more is charged as it is produced, once; less is given back, once."""
    rate = 1000
    one = [subject(tokens_per_minute=rate)]

    async def left() -> int:
        """Whole tokens that are left, without those that came in since."""
        verdict = await ledgers[0].take("probe", one, 0)
        await ledgers[0].settle("probe", one, 0)
        return verdict.levels[0].tokens // TICKS

    began = asyncio.get_running_loop().time()

    def near(tokens: int, expected: int) -> bool:
        return expected <= tokens <= expected + rate * (asyncio.get_running_loop().time() - began) / 60 + 1

    await ledgers[0].take("less", one, 300)
    await ledgers[0].take("more", one, 200)
    assert near(await left(), 500)
    for _ in range(2):
        await ledgers[-1].renew("more", one, 150)
        await ledgers[-1].renew("more", one, 600)
    assert near(await left(), 100)
    for _ in range(2):
        await ledgers[-1].settle("less", one, 10)
        await ledgers[-1].settle("more", one, 900)
    assert near(await left(), 90)


async def test_debt_delays_what_comes_next(ledgers: list[Ledger]) -> None:
    one = [subject(tokens_per_minute=600)]
    await ledgers[0].take("a", one, 100)
    await ledgers[0].settle("a", one, 1200)
    refusal = (await ledgers[-1].take("b", one, 1)).refusal
    assert refusal is not None
    assert 55_000 < refusal.wait_ms <= 60_200


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 3), st.integers(0, 60)),
        st.tuples(st.just("settle"), st.integers(0, 3), st.integers(0, 90)),
        st.tuples(st.just("renew"), st.integers(0, 3), st.integers(0, 90)),
    ),
    max_size=25,
)


class Model:
    """One subject with all three limits, as one would write it down."""

    def __init__(self, requests: int, tokens: int, places: int) -> None:
        self.rates, self.places = (requests, tokens), places
        self.levels, self.at, self.held = [full(requests), full(tokens)], None, dict[str, int]()

    def advance(self, now: int) -> None:
        elapsed = now - (now if self.at is None else self.at)
        self.levels = [refilled(level, rate, elapsed) for level, rate in zip(self.levels, self.rates, strict=True)]
        self.at = now

    def take(self, grant: str, tokens: int) -> bool:
        wanted = zip(self.levels, self.rates, (1, tokens), strict=True)
        if len(self.held) >= self.places or any(wait_ms(*one) for one in wanted):
            return False
        self.levels = [self.levels[0] - TICKS, self.levels[1] - tokens * TICKS]
        self.held[grant] = tokens
        return True

    def charge(self, tokens: int) -> None:
        self.levels[1] = min(full(self.rates[1]), self.levels[1] - tokens * TICKS)


@given(STEPS, st.lists(st.integers(0, 40_000), min_size=25, max_size=25))
async def test_the_ledger_in_memory_is_the_model(steps: list[tuple[str, int, int]], pauses: list[int]) -> None:
    now = 5_000_000
    ledger, model = MemoryLedger(lambda: now / 1000), Model(10, 100, 2)
    one = [subject(requests_per_minute=10, tokens_per_minute=100, concurrent_requests=2)]
    for (what, number, tokens), pause in zip(steps, pauses, strict=False):
        now += pause
        model.advance(now)
        grant = f"g{number}"
        if what == "take" and grant not in model.held:
            verdict = await ledger.take(grant, one, tokens)
            assert (verdict.refusal is None) is model.take(grant, tokens)
            assert list(verdict.levels[0]) == model.levels
        elif what == "settle":
            await ledger.settle(grant, one, tokens)
            if grant in model.held:
                model.charge(tokens - model.held.pop(grant))
        elif what == "renew":
            await ledger.renew(grant, one, tokens)
            if grant in model.held and tokens > model.held[grant]:
                model.charge(tokens - model.held[grant])
                model.held[grant] = tokens


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None)
@given(steps=STEPS)
async def test_the_ledger_in_redis_is_the_model(server: RedisServer, steps: list[tuple[str, int, int]]) -> None:
    """Redis' own clock runs; each answer says when it was, and levels agree to the tick."""
    store = Store(server.url, 60)
    await store.client.flushall()
    ledger, model = RedisLedger(store), Model(10, 100, 2)
    one = [subject(requests_per_minute=10, tokens_per_minute=100, concurrent_requests=2)]
    times: list[int] = []

    async def take(*arguments: Any, **more: Any) -> Any:
        answer = await script(*arguments, **more)
        times.append(answer[3])
        return answer

    script, ledger._take = ledger._take, take
    for what, number, tokens in steps:
        grant = f"g{number}"
        if what == "take" and grant not in model.held:
            verdict = await ledger.take(grant, one, tokens)
            model.advance(times[-1])
            assert (verdict.refusal is None) is model.take(grant, tokens)
            assert list(verdict.levels[0]) == model.levels
        elif what != "take" and grant in model.held:
            # How much a full bucket overflows depends on the moment: only charges are moved to the model's next one.
            used = tokens + model.held[grant]
            await (ledger.settle if what == "settle" else ledger.renew)(grant, one, used)
            model.charge(used - model.held[grant])
            model.held[grant] = used
            if what == "settle":
                del model.held[grant]
    await store.close()


async def test_a_gateway_that_died_gives_its_places_back(server: RedisServer) -> None:
    store = Store(server.url, 60)
    ledger, one = RedisLedger(store), [subject(concurrent_requests=1)]
    assert (await ledger.take("dead", one, 0)).refusal is None
    [places] = await store.client.keys("*:places")
    assert LEASE_MS - 5_000 < await store.client.pttl(places) <= LEASE_MS
    await store.client.zadd(places, {"dead": 1})  # as if its lease had run out
    assert (await ledger.take("next", one, 0)).refusal is None
    await ledger.settle("next", one, 0)
    await store.close()


async def test_keys_of_a_tenant_lie_together_and_end_by_themselves(server: RedisServer) -> None:
    store = Store(server.url, 60)
    ledger = RedisLedger(store)
    both = [subject(requests_per_minute=60, concurrent_requests=3), subject(KEY, tokens_per_minute=60)]
    await ledger.take("g", both, 5)
    names = [name.decode() for name in await store.client.keys("*")]
    assert len(names) == 4
    assert all(name.startswith("quire:limits:1:{acme}:") for name in names)
    for name in names:
        assert 0 < await store.client.pttl(name) <= 62_000, name
    await store.close()


async def test_idle_accounts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.quota.memory_ledger.MOST_IDLE", 10)
    now = 0.0
    ledger = MemoryLedger(lambda: now)
    for number in range(30):
        now += 61
        await ledger.take(f"g{number}", [subject((f"t{number}", ""), requests_per_minute=5)], 0)
        if number:  # the first one stays
            await ledger.settle(f"g{number}", [subject((f"t{number}", ""), requests_per_minute=5)], 0)
    assert len(ledger._accounts) <= 12
    assert ("t0", "") in ledger._accounts


@pytest.mark.parametrize("new", [{"requests_per_minute": 3}, {"requests_per_minute": 100, "tokens_per_minute": 50}])
async def test_a_limit_that_changes_holds_at_once(ledgers: list[Ledger], new: dict[str, int]) -> None:
    await ledgers[0].take("a", [subject(requests_per_minute=50)], 0)
    verdict = await ledgers[0].take("b", [subject(**new)], 50)
    assert verdict.refusal is None
    assert verdict.levels[0].requests <= full(new["requests_per_minute"]) - TICKS
    assert (verdict.levels[0].tokens == 0) or "tokens_per_minute" in new
