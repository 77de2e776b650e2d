"""The outermost layer: every answer carries a request id, and no failure leaves without an answer."""

from __future__ import annotations

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.http.errors import bad_request, error_response, from_exception
from services.gateway.positions import request_id_of

HEADER = "x-request-id"
LAST_EVENT = "last-event-id"
MAX_CHARACTERS = 120
"""The engine admits 128; the rest numbers the prompts of one HTTP request."""


class Edge:
    """ASGI middleware. The id is the client's x-request-id, that of its last event, or a drawn one.

    Handlers find it in `request.state`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        given = headers.get(HEADER, "") or request_id_of(headers.get(LAST_EVENT, ""))
        usable = len(given) <= MAX_CHARACTERS and given.isascii() and given.isprintable()
        request_id = given if given and usable else uuid.uuid4().hex
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        if not usable:
            refusal = bad_request(HEADER, f"must be at most {MAX_CHARACTERS} printable ASCII characters")
            await error_response(refusal, scope["path"], request_id)(scope, receive, send_with_id)
            return
        scope.setdefault("state", {})["request_id"] = request_id
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if started:
                raise
            refusal = from_exception(error, {})
            await error_response(refusal, scope["path"], request_id)(scope, receive, send_with_id)
