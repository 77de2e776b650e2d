"""Who asks: from a credential to a caller, the same on every surface.

A tenant comes from the credential alone, never from a body or another header: prefixes are shared and request ids are
unique within a tenant, and fairness counts what each was served.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from services.common.errors import QuireError, Reason
from services.gateway.caller import EVERYONE, Caller, digest_of, unauthenticated
from services.gateway.keys.document import Oidc, Roster

if TYPE_CHECKING:
    from services.gateway.tokens import Tokens


class KeySource(Protocol):
    """Where keys and tenants are kept."""

    @property
    def roster(self) -> Roster:
        """Who is known now. Raises STORE_LOST where nobody can say."""


class Identity:
    """Tells callers by the values of their `authorization` header or metadata."""

    def __init__(self, source: KeySource | None, clock: Callable[[], float] = time.time) -> None:
        """Without a source everybody is the tenant `default`."""
        self._source, self._clock = source, clock
        self._tokens: Tokens | None = None

    async def caller(self, authorization: Sequence[str]) -> Caller:
        """Who sent these values. UNAUTHENTICATED unless they are one known `Bearer CREDENTIAL`."""
        if self._source is None:
            return EVERYONE
        credential, roster = _credential(authorization), self._source.roster
        if roster.oidc is not None and credential.count(".") == 2:  # as no API key has that was made here
            return await self._checker(roster.oidc).caller(credential, roster)
        entry = roster.find(digest_of(credential))
        if entry is None:
            raise unauthenticated("the API key is not known")
        if entry.expires_at is not None and self._clock() >= entry.expires_at:
            raise unauthenticated("the API key has expired")
        return entry.caller

    def _checker(self, oidc: Oidc) -> Tokens:
        """What checks tokens as the roster says now."""
        if self._tokens is None or self._tokens.oidc != oidc:
            try:
                from services.gateway.tokens import Tokens
            except ImportError as error:
                what = "this gateway cannot check tokens: the package PyJWT[crypto] is missing"
                raise QuireError(Reason.PRECONDITION, what) from error
            self._tokens = Tokens(oidc)
        return self._tokens


def _credential(authorization: Sequence[str]) -> str:
    if not authorization:
        raise unauthenticated("an API key is required, as `authorization: Bearer KEY`")
    scheme, _, credential = authorization[0].strip().partition(" ")
    if len(authorization) > 1 or scheme.lower() != "bearer" or not (credential := credential.strip()):
        raise unauthenticated("authorization: must be one `Bearer KEY`")
    return credential
