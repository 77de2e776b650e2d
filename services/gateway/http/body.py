"""Reads and checks a request's body: bounded while it arrives, large ones parsed off the event loop."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from services.common.errors import Reason
from services.gateway.http.client_watch import ClientGone
from services.gateway.http.errors import HttpError, from_validation

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

INLINE_BYTES = 256 * 1024
"""Bodies up to this size are parsed on the event loop: well under a millisecond each."""

MAX_VALUES = (1 << 20) + (1 << 16)
"""The most JSON values of one body. The parser builds an object of each without letting other threads run."""

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)

STALL_SECONDS = 30.0
"""How long a client may send nothing in the middle of a body."""


async def read_as(request: Request, model: type[M], build: Callable[[M], T], limit: int) -> T:
    """What `build` makes of the body. Raises HttpError 400, 408, 413 or 415, and ClientGone."""
    raw = await _read(request, limit)

    def convert() -> T:
        try:
            parsed = model.model_validate(parse(raw))
        except ValidationError as error:
            raise from_validation(error) from None
        return build(parsed)

    return convert() if len(raw) <= INLINE_BYTES else await asyncio.to_thread(convert)


def parse(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`; nesting is bounded by the parser, the number of values here."""
    if _at_most_values(raw) > MAX_VALUES and _at_most_values(_STRING.sub(b"", raw)) > MAX_VALUES:
        raise HttpError(413, f"the body holds more than {MAX_VALUES} JSON values", Reason.TOO_LARGE.name.lower())
    try:
        value = from_json(raw)
    except ValueError as error:
        raise HttpError(400, f"the body is not JSON: {error}", "invalid_json") from None
    if not isinstance(value, dict):
        raise HttpError(400, "the body must be a JSON object", "invalid_json")
    return value


def _at_most_values(raw: bytes) -> int:
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


async def _read(request: Request, limit: int) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpError(415, "content-type: must be application/json", "unsupported_media_type", "content-type")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    chunks = request.stream()
    try:
        while True:
            async with asyncio.timeout(STALL_SECONDS):
                chunk = await anext(chunks, None)
            if chunk is None:
                return b"".join(parts)
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            parts.append(chunk)
    except ClientDisconnect:
        raise ClientGone from None
    except TimeoutError:
        raise HttpError(408, f"the body stalled for {STALL_SECONDS:g} s", "request_timeout") from None


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"the body is larger than the limit of {limit} bytes", Reason.TOO_LARGE.name.lower())
