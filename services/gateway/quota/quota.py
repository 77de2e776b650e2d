"""Lets requests in by what their tenant and key may still ask for, and counts what they use.

Prompt and expected output are held when a request comes in; output beyond that is charged as it is produced; what was
held and not used is given back at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable
from datetime import date
from typing import Literal

from services.common.errors import QuireError, Reason
from services.common.store import StoreLost
from services.gateway.caller import Caller
from services.gateway.quota.headers import rate_headers
from services.gateway.quota.ledger import LEASE_MS, Ledger, Refusal
from services.gateway.quota.limits import Subject, check_fits
from services.gateway.quota.memory_ledger import MemoryLedger
from services.gateway.quota.usage import Row, UsageBook

log = logging.getLogger("quire.gateway.quota")

TICK_SECONDS = 1.0
RENEW_TICKS = LEASE_MS // 3000
UNSTATED_OUTPUT = 256
"""Tokens of output that are held for each choice of a request that states no max_tokens."""


class Grant:
    """A request that was let in. `settle` must be called once it has ended, whatever happened."""

    def __init__(self, name: str, subjects: tuple[Subject, ...], ledger: Ledger, held: int) -> None:
        self.name, self.subjects, self.ledger, self.held = name, subjects, ledger, held
        self.headers: dict[str, str] = {}  # what its answer tells of rates
        self.used: Callable[[], int] = lambda: 0  # tokens of prompt and output so far
        self.telling = asyncio.Lock()


class Quota:
    """Owns the open grants. Used from one event loop."""

    def __init__(
        self,
        ledger: Ledger,
        usage: UsageBook,
        when_lost: Literal["open", "closed"] = "open",
        on_refusal: Callable[[str], None] = lambda limit: None,
    ) -> None:
        """`when_lost`: whether requests come in, counted by this gateway alone, while the ledger cannot be reached.

        `on_refusal` is told the limit, or "store_lost".
        """
        self._ledger, self._usage, self._when_lost, self._on_refusal = ledger, usage, when_lost, on_refusal
        self._alone = MemoryLedger()
        self._open: dict[str, Grant] = {}
        self._refused_until: dict[Subject, tuple[float, dict[str, str]]] = {}  # with the answer's headers
        self._settling: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="quota")

    async def stop(self) -> None:
        """Ends once all that was used is told, or cannot be."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._settling:
            await asyncio.wait(self._settling)
        try:
            await self._usage.flush()
        except StoreLost as error:
            log.error("usage of the last seconds is lost", extra={"why": str(error)})

    def check_pace(self, caller: Caller) -> None:
        """RATE_LIMITED where a request of this caller is known to be too early: it need not even be looked at."""
        now = asyncio.get_running_loop().time()
        for subject in caller.counted:
            until, headers = self._refused_until.get(subject, (now, {}))
            if until > now:
                raise self._refused(Refusal(subject, "requests_per_minute", round((until - now) * 1000)), headers)
            self._refused_until.pop(subject, None)

    async def enter(self, caller: Caller, prompt: int = 0, expected: int = 0) -> Grant:
        """Lets a request in. RATE_LIMITED where it has to wait, TOO_LARGE where that would never help, STORE_LOST."""
        subjects = caller.counted
        tokens = prompt + expected
        grant = Grant(uuid.uuid4().hex, subjects, self._ledger, tokens)
        if not subjects:
            return grant
        check_fits(subjects, tokens)
        try:
            verdict = await grant.ledger.take(grant.name, subjects, tokens)
        except StoreLost as error:
            if self._when_lost == "closed":
                self._on_refusal("store_lost")
                what = "limits cannot be checked: the store is lost"
                raise QuireError(Reason.STORE_LOST, what, retry_after=1.0) from error
            grant.ledger = self._alone
            verdict = await grant.ledger.take(grant.name, subjects, tokens)
        except BaseException:  # cancelled: the ledger may have let it in
            self._open[grant.name] = grant
            self.settle(grant, 0)
            raise
        headers = rate_headers(subjects, verdict.levels)
        if verdict.refusal is not None:
            if verdict.refusal.limit == "requests_per_minute":
                now = asyncio.get_running_loop().time()
                self._refused_until[verdict.refusal.subject] = now + verdict.refusal.wait_ms / 1000, headers
            raise self._refused(verdict.refusal, headers)
        grant.headers = headers
        self._open[grant.name] = grant
        return grant

    def uncounted(self) -> Grant:
        """For a request that came in elsewhere, and was counted there."""
        return Grant(uuid.uuid4().hex, (), self._ledger, 0)

    def settle(self, grant: Grant, used: int) -> None:
        """A request has ended, having used that many tokens. Idempotent."""
        if self._open.pop(grant.name, None) is None:
            return
        task = asyncio.create_task(self._settle(grant, used))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    def count(self, tenant: str, model: str, prompt: int, cached: int, output: int) -> None:
        """What a request that ended used; see UsageBook."""
        self._usage.count(tenant, model, prompt, cached, output)

    async def usage(self, first: date, last: date) -> list[Row]:
        """What was used on those days, by day, tenant and model. STORE_LOST."""
        try:
            return await self._usage.read(first, last)
        except StoreLost as error:
            raise QuireError(Reason.STORE_LOST, f"usage cannot be read: {error}") from error

    def _refused(self, refusal: Refusal, headers: dict[str, str]) -> QuireError:
        self._on_refusal(refusal.limit)
        seconds = refusal.wait_ms / 1000
        what = f"{refusal.limit}: the limit of {refusal.subject} is reached; try again in {seconds:.3g} s"
        return QuireError(Reason.RATE_LIMITED, what, retry_after=max(seconds, 0.001), headers=headers)

    async def _run(self) -> None:
        """Charges what is produced beyond what is held, keeps places, and brings usage to where it is kept."""
        tick = 0
        while True:
            await asyncio.sleep(TICK_SECONDS)
            tick += 1
            for grant in list(self._open.values()):
                if grant.name in self._open and (grant.used() > grant.held or tick % RENEW_TICKS == 0):
                    await self._renew(grant)
            with contextlib.suppress(StoreLost):
                await self._usage.flush()

    async def _renew(self, grant: Grant) -> None:
        grant.held = max(grant.held, grant.used())
        async with grant.telling:
            if grant.name in self._open:
                with contextlib.suppress(StoreLost):
                    await grant.ledger.renew(grant.name, grant.subjects, grant.held)

    async def _settle(self, grant: Grant, used: int) -> None:
        async with grant.telling:  # a renewal that came behind would hold the place again
            # Told aloud by the store: places end with their lease, and levels rise by themselves.
            with contextlib.suppress(StoreLost):
                await grant.ledger.settle(grant.name, grant.subjects, used)
