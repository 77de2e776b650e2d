"""The one table of errors, the exception that carries them, and the interceptor that turns them into statuses.

Domain code raises `QuireError`; servicers never build statuses themselves. On HTTP the gateway maps the same
table to OpenAI's error shape.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from quire.v1 import types_pb2

log = logging.getLogger("quire.errors")
DOMAIN = "quire"
MOST_CHARACTERS = 500
"""Of a message on the wire: statuses travel in headers, three times over."""


@dataclass(frozen=True, slots=True, eq=False)  # by identity: equal rows must stay distinct members
class ErrorKind:
    """One row: the canonical gRPC status, the HTTP status, and whether the same request may succeed later."""

    code: grpc.StatusCode
    http: int
    retryable: bool


class Reason(enum.Enum):
    """Machine-readable reasons; the name travels in `google.rpc.ErrorInfo.reason`."""

    INVALID_FIELD = ErrorKind(grpc.StatusCode.INVALID_ARGUMENT, 400, False)
    CONTEXT_EXCEEDED = ErrorKind(grpc.StatusCode.INVALID_ARGUMENT, 400, False)
    UNAUTHENTICATED = ErrorKind(grpc.StatusCode.UNAUTHENTICATED, 401, False)
    PERMISSION_DENIED = ErrorKind(grpc.StatusCode.PERMISSION_DENIED, 403, False)
    UNSUPPORTED = ErrorKind(grpc.StatusCode.UNIMPLEMENTED, 400, False)
    MODEL_NOT_FOUND = ErrorKind(grpc.StatusCode.NOT_FOUND, 404, False)
    NOT_FOUND = ErrorKind(grpc.StatusCode.NOT_FOUND, 404, False)
    ALREADY_EXISTS = ErrorKind(grpc.StatusCode.ALREADY_EXISTS, 409, False)
    TAKEN_OVER = ErrorKind(grpc.StatusCode.ABORTED, 409, False)
    OUT_OF_RANGE = ErrorKind(grpc.StatusCode.OUT_OF_RANGE, 400, False)
    TOO_LARGE = ErrorKind(grpc.StatusCode.RESOURCE_EXHAUSTED, 413, False)
    NEVER_FITS = ErrorKind(grpc.StatusCode.RESOURCE_EXHAUSTED, 413, False)
    QUEUE_FULL = ErrorKind(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, True)
    RATE_LIMITED = ErrorKind(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, True)
    SLOW_READER = ErrorKind(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, True)
    DEADLINE = ErrorKind(grpc.StatusCode.DEADLINE_EXCEEDED, 504, True)
    CANCELLED = ErrorKind(grpc.StatusCode.CANCELLED, 499, False)
    DRAINING = ErrorKind(grpc.StatusCode.UNAVAILABLE, 503, True)
    CIRCUIT_OPEN = ErrorKind(grpc.StatusCode.UNAVAILABLE, 503, True)
    SCHEDULER_LOST = ErrorKind(grpc.StatusCode.UNAVAILABLE, 503, True)
    EXECUTOR_LOST = ErrorKind(grpc.StatusCode.UNAVAILABLE, 503, True)
    KVMANAGER_LOST = ErrorKind(grpc.StatusCode.UNAVAILABLE, 503, True)
    STORE_LOST = ErrorKind(grpc.StatusCode.UNAVAILABLE, 503, True)
    NO_EXECUTOR = ErrorKind(grpc.StatusCode.UNAVAILABLE, 503, True)
    MODEL_LOAD_FAILED = ErrorKind(grpc.StatusCode.FAILED_PRECONDITION, 400, False)
    PRECONDITION = ErrorKind(grpc.StatusCode.FAILED_PRECONDITION, 409, False)
    PLAN_GAP = ErrorKind(grpc.StatusCode.FAILED_PRECONDITION, 500, True)
    STALE_EPOCH = ErrorKind(grpc.StatusCode.FAILED_PRECONDITION, 500, True)
    PROTOCOL = ErrorKind(grpc.StatusCode.FAILED_PRECONDITION, 500, False)
    NOT_FINITE = ErrorKind(grpc.StatusCode.INTERNAL, 500, False)
    INTERNAL = ErrorKind(grpc.StatusCode.INTERNAL, 500, False)


class QuireError(Exception):
    """A failure with a reason from the table. `field` names the offending request field where there is one.

    `retry_after` is in seconds, where that is known; `headers` go with the answer, over HTTP and gRPC alike.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        field: str = "",
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.reason, self.message, self.field = reason, message, field
        self.retry_after, self.headers = retry_after, headers or {}

    def to_detail(self) -> types_pb2.ErrorDetail:
        """The form that travels on internal streams."""
        kind = self.reason.value
        return types_pb2.ErrorDetail(
            reason=self.reason.name,
            message=self.message,
            retryable=kind.retryable,
            status_code=kind.code.value[0],
        )

    @classmethod
    def from_detail(cls, detail: types_pb2.ErrorDetail) -> QuireError:
        reason = Reason[detail.reason] if detail.reason in Reason.__members__ else Reason.INTERNAL
        return cls(reason, detail.message)

    def to_status(self) -> status_pb2.Status:
        """A `google.rpc.Status` with ErrorInfo, BadRequest where a field is at fault, RetryInfo where it is known."""
        kind, message = self.reason.value, _shortened(self.message)
        info = error_details_pb2.ErrorInfo(
            reason=self.reason.name, domain=DOMAIN, metadata={"retryable": str(kind.retryable).lower()}
        )
        details = [_pack(info)]
        if self.field:
            violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=message)
            details.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
        if self.retry_after is not None:
            delay = duration_pb2.Duration()
            delay.FromMilliseconds(math.ceil(self.retry_after * 1000))
            details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
        return status_pb2.Status(code=code_pb2.Code.Value(kind.code.name), message=message, details=details)


def invalid(field: str, message: str) -> QuireError:
    """The error for a bad request field; the message begins with the field's name."""
    return QuireError(Reason.INVALID_FIELD, f"{field}: {message}", field=field)


def from_rpc_error(error: grpc.RpcError, lost: Reason) -> QuireError:
    """The table row behind a failed call; `lost` where the peer is simply gone."""
    status = rpc_status.from_call(error) if hasattr(error, "trailing_metadata") else None
    message = status.message if status is not None else ""
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.reason in Reason.__members__:
            return QuireError(Reason[info.reason], message)
    text = error.details() if hasattr(error, "details") else str(error)
    code = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return QuireError(lost, text or lost.name)
    return QuireError(Reason.INTERNAL, text or str(code))


def _shortened(message: str) -> str:
    """Without its middle where it is long, as it is where it repeats what a client wrote: headers take 16 KiB."""
    if len(message) <= MOST_CHARACTERS:
        return message
    half = MOST_CHARACTERS // 2
    return f"{message[:half]} ... {message[-half:]}"


def _pack(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: QuireError) -> None:
    """Ends a call with the error's status; returns where the call was over by then and nobody is left to be told."""
    status = rpc_status.to_status(error.to_status())
    status = status._replace(trailing_metadata=(*status.trailing_metadata, *error.headers.items()))
    with contextlib.suppress(grpc.aio.InternalError):
        await context.abort_with_status(status)


def _translate(error: Exception) -> QuireError:
    if isinstance(error, QuireError):
        return error
    if isinstance(error, NotImplementedError):  # of a generated base class: a method of a service that is not served
        return QuireError(Reason.UNSUPPORTED, "this method is not served")
    log.exception("unexpected error in a handler", exc_info=error)
    return QuireError(Reason.INTERNAL, "internal error; see the service's log")


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Turns exceptions of handlers into statuses. Unknown ones are logged and answered with INTERNAL."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[(handler.request_streaming, handler.response_streaming)]
        behavior = getattr(handler, make.__name__.removesuffix("_rpc_method_handler"))
        wrap = _stream if inspect.isasyncgenfunction(behavior) else _unary
        return make(wrap(behavior), handler.request_deserializer, handler.response_serializer)


def _unary(behavior: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            result = behavior(request, context)
            return await result if inspect.isawaitable(result) else result
        except (grpc.aio.AbortError, grpc.RpcError):
            raise
        except Exception as error:
            await _abort(context, _translate(error))

    return call


def _stream(behavior: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async for item in behavior(request, context):
                yield item
        except (grpc.aio.AbortError, grpc.RpcError):
            raise
        except Exception as error:
            await _abort(context, _translate(error))

    return call
