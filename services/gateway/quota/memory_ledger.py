"""Counts of one gateway, in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.gateway.quota.bucket import TICKS, full, refilled, wait_ms
from services.gateway.quota.ledger import LIMITS, PLACE_WAIT_MS, Levels, Refusal, Verdict
from services.gateway.quota.limits import Subject

MOST_IDLE = 10_000
"""Accounts that may be kept, above which those that are full again are forgotten."""


@dataclass(slots=True)
class Account:
    """A subject's levels, in ticks at a moment, and its places. A rate without a limit has level 0."""

    at_ms: int
    requests: int
    tokens: int
    places: set[str] = field(default_factory=set)

    def advance(self, subject: Subject, now: int) -> None:
        elapsed, self.at_ms = max(0, now - self.at_ms), max(now, self.at_ms)
        rates = subject.rates
        self.requests = refilled(self.requests, rates.requests_per_minute or 0, elapsed)
        self.tokens = refilled(self.tokens, rates.tokens_per_minute or 0, elapsed)

    def idle(self, subject: Subject) -> bool:
        rates = subject.rates
        filled = (full(rates.requests_per_minute or 0), full(rates.tokens_per_minute or 0))
        return not self.places and (self.requests, self.tokens) == filled


class MemoryLedger:
    """A Ledger. Nothing awaits inside, so each call is atomic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[tuple[str, str], tuple[Subject, Account]] = {}
        self._held: dict[str, int] = {}

    async def take(self, grant: str, subjects: Sequence[Subject], tokens: int) -> Verdict:
        accounts = self._open(subjects)
        waits = [
            Refusal(subject, limit, wait)
            for subject, account in zip(subjects, accounts, strict=True)
            for limit, wait in zip(LIMITS, _waits(subject, account, tokens), strict=True)
            if wait
        ]
        if not waits:
            self._held[grant] = tokens
            for subject, account in zip(subjects, accounts, strict=True):
                if subject.rates.requests_per_minute is not None:
                    account.requests -= TICKS
                _charge(subject, account, tokens)
                account.places.add(grant)
        longest = max(waits, key=lambda refusal: refusal.wait_ms, default=None)
        return Verdict(longest, tuple(Levels(account.requests, account.tokens) for account in accounts))

    async def renew(self, grant: str, subjects: Sequence[Subject], used: int) -> None:
        held = self._held.get(grant)
        if held is None or used <= held:
            return
        self._held[grant] = used
        for subject, account in zip(subjects, self._open(subjects), strict=True):
            _charge(subject, account, used - held)

    async def settle(self, grant: str, subjects: Sequence[Subject], used: int) -> None:
        held = self._held.pop(grant, None)
        if held is None:
            return
        for subject, account in zip(subjects, self._open(subjects), strict=True):
            account.places.discard(grant)
            _charge(subject, account, used - held)

    def _open(self, subjects: Sequence[Subject]) -> list[Account]:
        """The accounts as they are now."""
        now = int(self._clock() * 1000)
        if len(self._accounts) > MOST_IDLE:
            self._forget_idle(now)
        return [self._account(subject, now) for subject in subjects]

    def _account(self, subject: Subject, now: int) -> Account:
        name, rates = (subject.tenant, subject.key), subject.rates
        known, account = self._accounts.get(name, (None, None))
        if account is None or known is None:
            account = Account(now, full(rates.requests_per_minute or 0), full(rates.tokens_per_minute or 0))
        elif known.rates != rates:  # a limit that is new begins full
            if known.rates.requests_per_minute is None:
                account.requests = full(rates.requests_per_minute or 0)
            if known.rates.tokens_per_minute is None:
                account.tokens = full(rates.tokens_per_minute or 0)
        account.advance(subject, now)
        self._accounts[name] = subject, account
        return account

    def _forget_idle(self, now: int) -> None:
        for name, (subject, account) in list(self._accounts.items()):
            account.advance(subject, now)
            if account.idle(subject):
                del self._accounts[name]


def _waits(subject: Subject, account: Account, tokens: int) -> tuple[int, int, int]:
    """Milliseconds to wait for each of LIMITS."""
    rates = subject.rates
    places = rates.concurrent_requests
    return (
        wait_ms(account.requests, rates.requests_per_minute, 1) if rates.requests_per_minute else 0,
        wait_ms(account.tokens, rates.tokens_per_minute, tokens) if rates.tokens_per_minute else 0,
        PLACE_WAIT_MS if places is not None and len(account.places) >= places else 0,
    )


def _charge(subject: Subject, account: Account, tokens: int) -> None:
    """Takes tokens, or gives back where negative, at most up to a full bucket."""
    if (rate := subject.rates.tokens_per_minute) is not None:
        account.tokens = min(full(rate), account.tokens - tokens * TICKS)
