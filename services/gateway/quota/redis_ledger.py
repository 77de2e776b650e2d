"""Counts that several gateways share, in Redis: each call is one script, which runs as a whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from services.common.store import Store
from services.gateway.quota.ledger import LEASE_MS, LIMITS, PLACE_WAIT_MS, Levels, Refusal, Verdict
from services.gateway.quota.limits import Subject

PREFIX = "quire:limits:1"


class RedisLedger:
    """A Ledger. A tenant's keys carry its name in braces: they lie on one node of a cluster."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._take, self._renew, self._settle = (_script(store, name) for name in ("take", "renew", "settle"))

    async def take(self, grant: str, subjects: Sequence[Subject], tokens: int) -> Verdict:
        answer = await self._run(self._take, grant, subjects, tokens, PLACE_WAIT_MS)
        refusing, limit, wait, _now, *levels = answer
        refusal = Refusal(subjects[refusing - 1], LIMITS[limit - 1], wait) if refusing else None
        return Verdict(refusal, tuple(map(Levels, levels[::2], levels[1::2])))

    async def renew(self, grant: str, subjects: Sequence[Subject], used: int) -> None:
        await self._run(self._renew, grant, subjects, used)

    async def settle(self, grant: str, subjects: Sequence[Subject], used: int) -> None:
        await self._run(self._settle, grant, subjects, used)

    async def _run(self, script: Any, grant: str, subjects: Sequence[Subject], tokens: int, *more: int) -> list[int]:
        tenant = subjects[0].tenant
        names, arguments = [f"{PREFIX}:{{{tenant}}}:grant:{grant}"], [grant, LEASE_MS, tokens]
        for subject in subjects:
            account = f"{PREFIX}:{{{tenant}}}:" + (f"key:{subject.key}" if subject.key else "tenant")
            names += [account, f"{account}:places"]
            rates = subject.rates
            limits = (rates.requests_per_minute, rates.tokens_per_minute, rates.concurrent_requests)
            arguments += [-1 if limit is None else limit for limit in limits]
        answer: list[int] = await self._store.ask(lambda: script(keys=names, args=[*arguments, *more]))
        return answer


def _script(store: Store, name: str) -> Any:
    folder = files("services.gateway.quota")
    return store.client.register_script(
        "\n".join((folder / f"{part}.lua").read_text(encoding="utf-8") for part in ("common", name))
    )
