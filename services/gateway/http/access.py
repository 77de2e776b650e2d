"""Lets in whoever has a key, before anything of a request's body is read."""

from __future__ import annotations

from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.identity import Identity

OPEN: Final = frozenset({"/health", "/openapi.json"})
"""Paths that need no key."""


class Access:
    """ASGI middleware. Handlers find the caller in `request.state`; a refusal is raised to the layer around it."""

    def __init__(self, app: ASGIApp, identity: Identity) -> None:
        self._app, self._identity = app, identity

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in OPEN:
            caller = await self._identity.caller(Headers(scope=scope).getlist("authorization"))
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)
