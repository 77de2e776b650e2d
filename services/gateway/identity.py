"""Who asks: from a credential to a caller, the same on every surface.

A tenant comes from the credential alone, never from a body or another header: prefixes are shared and request ids are
unique within a tenant, and fairness counts what each was served.
"""

from __future__ import annotations

import enum
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.common.errors import QuireError, Reason
from services.common.limits import MAX_PRIORITY


class Scope(enum.StrEnum):
    """What a credential opens."""

    INFER = "infer"  # generate, tokenize, list models
    ADMIN = "admin"  # see the state of all services, change models and executors
    METRICS = "metrics"  # read /metrics


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a request counts for, and what it may do."""

    tenant: str
    key: str = ""  # id of the API key; empty where it was none
    weight: float = 1.0  # its share beside other tenants that wait as well
    max_priority: int = 0
    scopes: frozenset[Scope] = frozenset({Scope.INFER})

    def check_priority(self, priority: int) -> None:
        """PERMISSION_DENIED where a request claims more urgency than its tenant has."""
        if priority > self.max_priority:
            what = f"priority: {priority} is above {self.max_priority}, the highest of this API key"
            raise QuireError(Reason.PERMISSION_DENIED, what, field="priority")

    def check_scope(self, scope: Scope) -> None:
        """PERMISSION_DENIED unless the credential has the scope."""
        if scope not in self.scopes:
            raise QuireError(Reason.PERMISSION_DENIED, f"this call needs a credential with the scope {scope.value!r}")


EVERYONE = Caller("default", max_priority=MAX_PRIORITY, scopes=frozenset(Scope))
"""Whoever reaches a gateway without keys."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An API key that is known."""

    caller: Caller
    expires_at: float | None = None  # Unix seconds


def digest_of(key: str) -> bytes:
    """SHA-256 of a key: what is kept of it. Keys are drawn at random, so nothing slower is needed."""
    return hashlib.sha256(key.encode()).digest()


def key_id(digest: bytes) -> str:
    """What a key is called where people and logs speak of it: the beginning of its digest."""
    return digest.hex()[:12]


class Identity:
    """Tells callers by the values of their `authorization` header or metadata."""

    def __init__(self, find: Callable[[bytes], Entry | None] | None, clock: Callable[[], float] = time.time) -> None:
        """`find` knows API keys by digest. Without it everybody is the tenant `default`."""
        self._find, self._clock = find, clock

    async def caller(self, authorization: Sequence[str]) -> Caller:
        """Who sent these values. UNAUTHENTICATED unless they are one known `Bearer KEY`."""
        if self._find is None:
            return EVERYONE
        entry = self._find(digest_of(_credential(authorization)))
        if entry is None:
            raise unauthenticated("the API key is not known")
        if entry.expires_at is not None and self._clock() >= entry.expires_at:
            raise unauthenticated("the API key has expired")
        return entry.caller


def _credential(authorization: Sequence[str]) -> str:
    if not authorization:
        raise unauthenticated("an API key is required, as `authorization: Bearer KEY`")
    scheme, _, credential = authorization[0].strip().partition(" ")
    if len(authorization) > 1 or scheme.lower() != "bearer" or not (credential := credential.strip()):
        raise unauthenticated("authorization: must be one `Bearer KEY`")
    return credential


def unauthenticated(message: str) -> QuireError:
    return QuireError(Reason.UNAUTHENTICATED, message)
