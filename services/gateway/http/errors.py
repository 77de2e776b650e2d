"""Failures in OpenAI's shape: {"error": {"message", "type", "param", "code"}}, with the status of the error table."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.responses import Response

from services.common.errors import QuireError, Reason
from services.gateway.field_names import renamed
from services.gateway.http.encoding import JsonResponse

log = logging.getLogger("quire.http")

_MAX_PARAM = 100  # characters of a client's own field name that are repeated to it
_BRANCH = re.compile(r"str$|(constrained-)?(list|dict|str)\[|\[key\]$")  # how pydantic names branches in a path
_CODES = {
    Reason.INVALID_FIELD: "invalid_value",
    Reason.CONTEXT_EXCEEDED: "context_length_exceeded",
    Reason.UNSUPPORTED: "unsupported_parameter",
    Reason.UNAUTHENTICATED: "invalid_api_key",
    Reason.QUEUE_FULL: "rate_limit_exceeded",
    Reason.RATE_LIMITED: "rate_limit_exceeded",
}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = _TYPES | {
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
ANTHROPIC = "/v1/messages"
"""How the paths begin whose failures have Anthropic's shape."""


@dataclass
class HttpError(Exception):
    """A failure as HTTP tells it. `retryable` is whether the same request may succeed later."""

    status: int
    message: str
    code: str
    param: str | None = None
    retryable: bool = False
    retry_after: float = 1.0  # seconds
    extra: Mapping[str, str] = field(default_factory=dict)  # headers

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Tells clients how to come in, and those that repeat failed calls by themselves whether it makes sense."""
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        if self.status not in (409, 429) and self.status < 500:
            return {}
        advice = {"x-should-retry": str(self.retryable).lower(), **self.extra}
        if self.retryable:
            advice |= {
                "retry-after": str(max(1, math.ceil(self.retry_after))),
                "retry-after-ms": str(max(1, math.ceil(self.retry_after * 1000))),
            }
        return advice


def error_response(error: HttpError, path: str, request_id: str) -> Response:
    """In the shape that clients of that path expect."""
    body = anthropic_error(error, request_id) if path.startswith(ANTHROPIC) else error.body()
    return JsonResponse(body, error.status, headers=error.headers())


def anthropic_error(error: HttpError, request_id: str) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


def bad_request(param: str, message: str, code: str = "invalid_value") -> HttpError:
    """400 for a field; the message begins with its name."""
    return HttpError(400, f"{param}: {message}", code, param)


def from_quire(error: QuireError, names: Mapping[str, str]) -> HttpError:
    """`names` maps paths of the engine's input to the fields that the client wrote."""
    kind, message, param = error.reason.value, error.message, None
    if error.field:
        param, message = renamed(error, names)
    code = _CODES.get(error.reason, error.reason.name.lower())
    wait = 1.0 if error.retry_after is None else error.retry_after
    return HttpError(kind.http, message, code, param, kind.retryable, wait, error.headers)


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Failures of the engine name the client's fields."""
    try:
        yield
    except QuireError as error:
        raise from_quire(error, names) from None


def from_exception(error: Exception, names: Mapping[str, str]) -> HttpError:
    """Any failure; what nobody foresaw is logged and told as an internal error."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, QuireError):
        return from_quire(error, names)
    log.error("unexpected error in a request", exc_info=error)
    return from_quire(QuireError(Reason.INTERNAL, "internal error; see the service's log"), names)


def from_validation(error: ValidationError) -> HttpError:
    """400 for the first problem of a body; clients repair one field at a time."""
    problems = error.errors(include_url=False, include_input=False)
    field = problems[0]["loc"][:1]
    # Of a union each branch has its complaint: the branch that was meant is the one that got furthest.
    problem = max((one for one in problems if one["loc"][:1] == field), key=_progress)
    kind, message = problem["type"], problem["msg"]
    path = problem["loc"]
    if kind in ("unknown_field", "missing_field"):
        path = (*path, problem["ctx"]["name"])
    param = _dotted(path)
    code = {
        "unknown_field": "unknown_parameter",
        "unsupported_parameter": kind,
        "missing": "missing_parameter",
        "missing_field": "missing_parameter",
    }
    return bad_request(param or "body", message[:1].lower() + message[1:], code.get(kind, "invalid_value"))


def _progress(problem: ErrorDetails) -> list[int]:
    return [part for part in problem["loc"] if isinstance(part, int)]


def _dotted(path: tuple[int | str, ...]) -> str:
    """("messages", 0, "content") as messages[0].content; names of union branches, as list[...], are left out."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not _BRANCH.match(part):
            text += f".{part[:_MAX_PARAM]}" if text else part[:_MAX_PARAM]
    return text
