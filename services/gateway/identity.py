"""Who asks: from an API key to a tenant, the same on every surface. Only `Keys` knows where keys are kept.

A tenant comes from the key alone, never from a body or another header: prefixes are shared and request ids are unique
within a tenant, and fairness counts what each was served.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.common.errors import QuireError, Reason
from services.common.limits import MAX_PRIORITY


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a request counts for, and what it may do."""

    tenant: str
    weight: float = 1.0  # its share beside other tenants that wait as well
    max_priority: int = 0
    admin: bool = False

    def check_priority(self, priority: int) -> None:
        """PERMISSION_DENIED where a request claims more urgency than its tenant has."""
        if priority > self.max_priority:
            what = f"priority: {priority} is above {self.max_priority}, the highest of this API key"
            raise QuireError(Reason.PERMISSION_DENIED, what, field="priority")

    def check_admin(self) -> None:
        """PERMISSION_DENIED unless the caller runs the service."""
        if not self.admin:
            raise QuireError(Reason.PERMISSION_DENIED, "this call needs an API key with admin = true")


EVERYONE = Caller("default", max_priority=MAX_PRIORITY, admin=True)
"""Whoever reaches a gateway without keys."""


class Keys(Protocol):
    """Where API keys are kept, by digest."""

    async def find(self, digest: bytes) -> Caller | None:
        """Whose key has that `digest_of`; None where nobody's has. Takes as long for the one as for the other."""


def digest_of(key: str) -> bytes:
    """SHA-256 of a key: what is kept of it. Keys are drawn at random, so nothing slower is needed."""
    return hashlib.sha256(key.encode()).digest()


class Identity:
    """Tells callers by the values of their `authorization` header or metadata."""

    def __init__(self, keys: Keys | None) -> None:
        """Without keys everybody is the tenant `default`."""
        self._keys = keys

    async def caller(self, authorization: Sequence[str]) -> Caller:
        """Who sent these values. UNAUTHENTICATED unless they are one known `Bearer KEY`."""
        if self._keys is None:
            return EVERYONE
        if not authorization:
            raise _unauthenticated("an API key is required, as `authorization: Bearer KEY`")
        scheme, _, key = authorization[0].strip().partition(" ")
        if len(authorization) > 1 or scheme.lower() != "bearer" or not (key := key.strip()):
            raise _unauthenticated("authorization: must be one `Bearer KEY`")
        caller = await self._keys.find(digest_of(key))
        if caller is None:
            raise _unauthenticated("the API key is not known")
        return caller


def _unauthenticated(message: str) -> QuireError:
    return QuireError(Reason.UNAUTHENTICATED, message)
