"""Lets in whoever has a credential, before anything of a request's body is read.

What a route needs is decided by its path; what is not listed needs the scope `admin`.
"""

from __future__ import annotations

from typing import Final

from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.caller import Scope as Needed
from services.gateway.identity import Identity

OPEN: Final = frozenset({"/health"})
"""Paths that need no credential."""

INFER: Final = ("/v1/", "/tokenize", "/detokenize")
"""How the paths begin that need the scope `infer`."""


class Access:
    """ASGI middleware. Handlers find the caller in `request.state`; a refusal is raised to the layer around it."""

    def __init__(self, app: ASGIApp, identity: Identity) -> None:
        self._app, self._identity = app, identity

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in OPEN:
            caller = await self._identity.caller(_credentials(Headers(scope=scope)))
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)


def _credentials(headers: Headers) -> list[str]:
    """Anthropic's clients send a key by itself; whoever sends the same one twice means it once."""
    given = headers.getlist("authorization")
    return given + [value for key in headers.getlist("x-api-key") if (value := f"Bearer {key}") not in given]


class ScopedRoute(APIRoute):
    """A route that checks the caller's scope."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.path not in OPEN:
            scope["state"]["caller"].check_scope(needed(self.path))
        await super().handle(scope, receive, send)


def needed(path: str) -> Needed:
    """The scope that a route needs."""
    if path == "/metrics":
        return Needed.METRICS
    return Needed.INFER if path.startswith(INFER) else Needed.ADMIN
