"""Callers by signed tokens (JWT) of an identity provider, beside those with API keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jwt

from services.gateway.caller import Caller, Scope, unauthenticated
from services.gateway.jwks import SigningKeys
from services.gateway.keys.document import TENANT_PATTERN, Oidc, Roster

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Those whose checking key is public: one that is shared would make tokens as well."""
LEEWAY_SECONDS = 30
SCOPE_PREFIX = "quire:"


class Tokens:
    """Checks tokens of one issuer."""

    def __init__(self, oidc: Oidc) -> None:
        self.oidc = oidc
        self._keys = SigningKeys(oidc.issuer, oidc.jwks)

    async def caller(self, token: str, roster: Roster) -> Caller:
        """Who the token is of. UNAUTHENTICATED where anything about it is wrong."""
        try:
            header = jwt.get_unverified_header(token)
            if header.get("alg") not in ALGORITHMS:
                raise unauthenticated("the token is not signed by an algorithm that is taken")
            key = await self._keys.find(header.get("kid"))
            if key is None:
                raise unauthenticated("the token is signed by a key that its issuer does not show")
            claims = jwt.decode(
                token,
                key,
                algorithms=list(ALGORITHMS),
                issuer=self.oidc.issuer,
                audience=self.oidc.audience,
                leeway=LEEWAY_SECONDS,
                options={"require": ["exp", "iss", "aud"]},
            )
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            raise unauthenticated(f"the token is not valid: {error}") from None
        tenant = claims.get(self.oidc.tenant_claim)
        if not isinstance(tenant, str) or not re.fullmatch(TENANT_PATTERN, tenant) or tenant.endswith("\n"):
            raise unauthenticated(f"the token's claim {self.oidc.tenant_claim!r} names no tenant")
        return roster.member(tenant, scopes_of(claims))


def scopes_of(claims: Mapping[str, Any]) -> frozenset[Scope]:
    """What a token opens: of `scope` (words in a text) or `scp` (a list), those that begin with "quire:"."""
    said = claims.get("scope", claims.get("scp", ""))
    words = said.split() if isinstance(said, str) else said if isinstance(said, list) else []
    return frozenset(scope for scope in Scope if f"{SCOPE_PREFIX}{scope.value}" in words)
