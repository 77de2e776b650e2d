"""Whom a request counts for, and what it may do."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass

from services.common.errors import QuireError, Reason
from services.common.limits import MAX_PRIORITY
from services.gateway.quota.limits import NO_CAPS, Caps, Subject


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
    caps: Caps = NO_CAPS  # of each request
    counted: tuple[Subject, ...] = ()  # whose rates its requests count for

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


def unauthenticated(message: str) -> QuireError:
    return QuireError(Reason.UNAUTHENTICATED, message)
