"""The keys by which an identity provider signs: fetched when first needed, kept, and fetched anew when they may have
changed. A provider that is away changes nothing as long as it is known by what it said before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import jwt

from services.common.errors import QuireError, Reason
from services.gateway.keys.document import check_address

log = logging.getLogger("quire.gateway.jwks")

FRESH_SECONDS = 300.0
"""How long keys are used without asking."""
PAUSE_SECONDS = 10.0
"""The least time between two fetches, however many tokens name keys that nobody knows."""
FETCH_SECONDS = 5.0
MOST_BYTES = 1 << 20


class SigningKeys:
    """The key set of one issuer. Used from one event loop."""

    def __init__(self, issuer: str, jwks: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`jwks` is the address of the key set; None asks the issuer for it, as OpenID Connect Discovery says."""
        self._issuer, self._jwks, self._clock = issuer, jwks, clock
        self._keys: dict[str | None, Any] = {}
        self._fetched_at = self._tried_at = float("-inf")
        self._fetching = asyncio.Lock()

    async def find(self, key_id: str | None) -> Any:
        """The public key of that id; None where there is none. STORE_LOST while nothing is known of the issuer."""
        now = self._clock()
        stale = now - self._fetched_at >= FRESH_SECONDS
        if (stale or key_id not in self._keys) and now - self._tried_at >= PAUSE_SECONDS:
            async with self._fetching:
                if self._clock() - self._tried_at >= PAUSE_SECONDS:  # nobody else just did
                    await self._refresh()
        if not self._keys:
            raise QuireError(
                Reason.STORE_LOST,
                f"tokens cannot be checked: {self._issuer} does not answer",
                retry_after=PAUSE_SECONDS,
            )
        return self._keys.get(key_id)

    async def _refresh(self) -> None:
        self._tried_at = self._clock()
        try:
            async with httpx.AsyncClient(timeout=FETCH_SECONDS, follow_redirects=False) as client:
                address = self._jwks
                if address is None:
                    found = await _read(client, f"{self._issuer.rstrip('/')}/.well-known/openid-configuration")
                    if found.get("issuer") != self._issuer:
                        raise ValueError(f"it calls itself {found.get('issuer')!r}")
                    address = check_address(str(found.get("jwks_uri")))
                keys = _usable(await _read(client, address))
        except (httpx.HTTPError, ValueError, jwt.PyJWTError) as error:
            log.error("keys of the token issuer stay as they were", extra={"issuer": self._issuer, "why": str(error)})
            return
        self._keys, self._fetched_at = keys, self._clock()
        log.info("keys of the token issuer read", extra={"issuer": self._issuer, "keys": len(keys)})


async def _read(client: httpx.AsyncClient, address: str) -> Mapping[str, Any]:
    """The JSON object at an address. Raises ValueError for anything else."""
    async with client.stream("GET", address, headers={"accept": "application/json"}) as answer:
        answer.raise_for_status()
        body = b""
        async for part in answer.aiter_bytes():
            body += part
            if len(body) > MOST_BYTES:
                raise ValueError(f"{address}: more than {MOST_BYTES} bytes")
    found = httpx.Response(200, content=body).json()
    if not isinstance(found, dict):
        raise ValueError(f"{address}: no JSON object")
    return found


def _usable(document: Mapping[str, Any]) -> dict[str | None, Any]:
    """Public keys for signatures by their id; what is of another kind is left out."""
    keys: dict[str | None, Any] = {}
    for one in document.get("keys") or ():
        if isinstance(one, dict) and one.get("use", "sig") == "sig" and one.get("kty") in ("RSA", "EC", "OKP"):
            try:
                keys[one.get("kid")] = jwt.PyJWK.from_dict(one)
            except jwt.PyJWTError as error:
                log.warning(
                    "a key of the token issuer cannot be used", extra={"kid": one.get("kid"), "why": str(error)}
                )
    if not keys:
        raise ValueError("no key that could have signed a token")
    return keys
