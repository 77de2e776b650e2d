"""Errors on their way out of a handler."""

from __future__ import annotations

from base64 import b64encode
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from services.common.errors import ErrorInterceptor, QuireError, Reason


async def wrapped(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    async def find(details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return handler

    return await ErrorInterceptor().intercept_service(find, SimpleNamespace(method="/a.Service/Method"))


async def test_an_error_for_a_client_that_is_gone_is_no_fault() -> None:
    """The call's deadline and the handler's pass in the same moment: the status can no longer be sent."""
    told: list[str] = []

    async def abort_with_status(status: grpc.Status) -> None:
        told.append(status.details)
        raise grpc.aio.InternalError("execute_batch failed")

    async def unary(request: Any, context: Any) -> None:
        raise QuireError(Reason.DEADLINE, "too late")

    async def stream(request: Any, context: Any) -> Any:
        yield 1
        raise QuireError(Reason.DEADLINE, "too late")

    context = SimpleNamespace(abort_with_status=abort_with_status)
    handler = await wrapped(grpc.unary_unary_rpc_method_handler(unary))
    assert await handler.unary_unary(None, context) is None
    handler = await wrapped(grpc.unary_stream_rpc_method_handler(stream))
    assert [item async for item in handler.unary_stream(None, context)] == [1]
    assert told == ["too late", "too late"]


async def test_an_error_says_when_to_come_back_and_what_goes_with_it() -> None:
    told: list[Any] = []

    async def abort_with_status(status: Any) -> None:
        told.append(status)

    async def unary(request: Any, context: Any) -> None:
        raise QuireError(Reason.RATE_LIMITED, "wait", retry_after=1.25, headers={"x-left": "0"})

    handler = await wrapped(grpc.unary_unary_rpc_method_handler(unary))
    await handler.unary_unary(None, SimpleNamespace(abort_with_status=abort_with_status))
    [status] = told
    assert status.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    metadata = dict(status.trailing_metadata)
    assert metadata["x-left"] == "0"
    retry = error_details_pb2.RetryInfo()
    details = status_pb2.Status.FromString(metadata["grpc-status-details-bin"]).details
    assert [retry.retry_delay.ToMilliseconds() for detail in details if detail.Unpack(retry)] == [1250]


async def test_a_method_that_is_not_served_is_no_fault() -> None:
    async def unary(request: Any, context: Any) -> None:
        raise NotImplementedError

    told: list[Any] = []

    async def abort_with_status(status: Any) -> None:
        told.append(status.code)

    handler = await wrapped(grpc.unary_unary_rpc_method_handler(unary))
    await handler.unary_unary(None, SimpleNamespace(abort_with_status=abort_with_status))
    assert told == [grpc.StatusCode.UNIMPLEMENTED]


@pytest.mark.parametrize("letter", ["x", "\N{GRINNING FACE}"])
def test_a_long_message_still_fits_into_headers(letter: str) -> None:
    name = letter * 20_000
    status = QuireError(Reason.INVALID_FIELD, f"model: {name} is not loaded", field="model").to_status()
    assert len(status.message) < 600
    assert status.message.startswith(f"model: {letter}")
    assert status.message.endswith(f"{letter} is not loaded")
    escaped, packed = len(quote(status.message)), len(b64encode(status.SerializeToString()))
    assert escaped + packed < 15_000
