"""Errors on their way out of a handler."""

from __future__ import annotations

from base64 import b64encode
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import grpc
import pytest

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


@pytest.mark.parametrize("letter", ["x", "\N{GRINNING FACE}"])
def test_a_long_message_still_fits_into_headers(letter: str) -> None:
    name = letter * 20_000
    status = QuireError(Reason.INVALID_FIELD, f"model: {name} is not loaded", field="model").to_status()
    assert len(status.message) < 600
    assert status.message.startswith(f"model: {letter}")
    assert status.message.endswith(f"{letter} is not loaded")
    escaped, packed = len(quote(status.message)), len(b64encode(status.SerializeToString()))
    assert escaped + packed < 15_000
