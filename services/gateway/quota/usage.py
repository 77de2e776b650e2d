"""What each tenant used of each model on each day (UTC): counted here, kept in this process or in Redis."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Protocol

from services.common.store import Store

COUNTS = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")
KEPT_DAYS = 400
PREFIX = "quire:usage:1"

_ADD = """
if redis.call('SET', KEYS[1], 1, 'NX', 'EX', 3600) then
  for index = 2, #KEYS do
    local fields = cjson.decode(ARGV[index])
    for field, count in pairs(fields) do redis.call('HINCRBY', KEYS[index], field, count) end
    redis.call('EXPIRE', KEYS[index], ARGV[1])
  end
end
return 0
"""


@dataclass(frozen=True, slots=True, order=True)
class Row:
    """One tenant's use of one model on one day."""

    day: date
    tenant: str
    model: str
    requests: int
    prompt_tokens: int
    cached_tokens: int  # of the prompt tokens
    output_tokens: int


class UsageBook(Protocol):
    """Counts requests that ended, and tells of them."""

    def count(self, tenant: str, model: str, prompt: int, cached: int, output: int) -> None:
        """One request and its tokens, on the present day."""

    async def flush(self) -> None:
        """Brings what was counted to where it is kept. Raises StoreLost; then it is brought the next time."""

    async def read(self, first: date, last: date) -> list[Row]:
        """What was used on days from `first` to `last`, in order. Raises StoreLost."""


def today() -> date:
    return datetime.now(UTC).date()


class MemoryUsage:
    """A UsageBook that lasts as long as the gateway."""

    def __init__(self, day: Callable[[], date] = today) -> None:
        self._day = day
        self._counts: dict[date, Counter[str]] = {}

    def count(self, tenant: str, model: str, prompt: int, cached: int, output: int) -> None:
        day = self._day()
        if day not in self._counts:
            self._counts[day] = Counter()
            for old in [one for one in self._counts if one <= day - timedelta(days=KEPT_DAYS)]:
                del self._counts[old]
        self._counts[day].update(_fields(tenant, model, prompt, cached, output))

    async def flush(self) -> None:
        pass

    async def read(self, first: date, last: date) -> list[Row]:
        return [row for day in sorted(self._counts) if first <= day <= last for row in _rows(day, self._counts[day])]


class RedisUsage:
    """A UsageBook that gateways share. Counts wait here until Redis has them, each batch exactly once."""

    def __init__(self, store: Store, day: Callable[[], date] = today) -> None:
        self._store, self._day = store, day
        self._add: Any = store.client.register_script(_ADD)
        self._new: dict[date, Counter[str]] = {}
        self._sent: tuple[str, dict[date, Counter[str]]] | None = None  # a batch that was not acknowledged yet

    def count(self, tenant: str, model: str, prompt: int, cached: int, output: int) -> None:
        self._new.setdefault(self._day(), Counter()).update(_fields(tenant, model, prompt, cached, output))

    async def flush(self) -> None:
        if self._sent is None and self._new:
            self._sent, self._new = (uuid.uuid4().hex, self._new), {}
        if self._sent is not None:
            batch, counts = self._sent
            await self._store.ask(lambda: self._send(batch, counts))
            self._sent = None

    async def read(self, first: date, last: date) -> list[Row]:
        await self.flush()
        days = [first + timedelta(days=n) for n in range((last - first).days + 1)]
        found = await self._store.ask(lambda: self._fetch(days))
        return [row for day, counts in zip(days, found, strict=True) for row in _rows(day, counts)]

    async def _send(self, batch: str, counts: Mapping[date, Counter[str]]) -> None:
        keys = [f"{PREFIX}:{{usage}}:batch:{batch}", *map(_key, counts)]
        await self._add(keys=keys, args=[KEPT_DAYS * 86_400, *map(json.dumps, counts.values())])

    async def _fetch(self, days: Iterable[date]) -> list[dict[str, int]]:
        pipeline = self._store.client.pipeline(transaction=False)
        for day in days:
            pipeline.hgetall(_key(day))
        return [{k.decode(): int(v) for k, v in answer.items()} for answer in await pipeline.execute()]


def _key(day: date) -> str:
    return f"{PREFIX}:{{usage}}:{day.isoformat()}"


def _fields(tenant: str, model: str, prompt: int, cached: int, output: int) -> dict[str, int]:
    """Neither tenants nor models have spaces in their names."""
    numbers = zip(COUNTS, (1, prompt, cached, output), strict=True)
    return {f"{tenant} {model} {name}": number for name, number in numbers}


def _rows(day: date, counts: Mapping[str, int]) -> list[Row]:
    whole: dict[tuple[str, str], dict[str, int]] = {}
    for field, number in counts.items():
        tenant, model, name = field.split(" ")
        whole.setdefault((tenant, model), {})[name] = number
    return [Row(day, *names, *(numbers.get(name, 0) for name in COUNTS)) for names, numbers in sorted(whole.items())]
