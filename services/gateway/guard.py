"""Lets in calls over gRPC by their credential: every method but health, before anything of a request is read.

What a method needs is decided by its name, else by its service; what is not listed needs the scope `admin`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any, Final

import grpc

from services.common.errors import QuireError
from services.gateway.caller import Caller, Scope
from services.gateway.identity import Identity

OPEN: Final = frozenset({"grpc.health.v1.Health"})
"""Services that need no credential."""

ANY: Final = frozenset({"grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection"})
"""Services that any credential opens."""

SCOPES: Final[Mapping[str, Scope]] = {
    "quire.v1.InferenceService": Scope.INFER,
    "quire.v1.AdminService": Scope.ADMIN,
    "inference.GRPCInferenceService": Scope.INFER,
    "vllm.grpc.engine.VllmEngine": Scope.INFER,
    "vllm.grpc.engine.VllmEngine/SubscribeKvEvents": Scope.ADMIN,  # they tell what all tenants' prompts are made of
}
"""By service, or by service and method."""

_caller: ContextVar[Caller] = ContextVar("caller")  # of the call that runs in this task


def caller() -> Caller:
    """Who makes the call that is being handled."""
    return _caller.get()


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """The interceptor. It goes inside the one that turns errors into statuses."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        method = details.method.lstrip("/")
        service = method.partition("/")[0]
        if service in OPEN:
            return await continuation(details)
        try:
            metadata = details.invocation_metadata or ()
            found = await self._identity.caller([str(value) for name, value in metadata if name == "authorization"])
            if service not in ANY:
                found.check_scope(SCOPES.get(method, SCOPES.get(service, Scope.ADMIN)))
        except QuireError as error:
            return _refusal(error)
        _caller.set(found)
        return await continuation(details)


def _refusal(refused: QuireError) -> grpc.RpcMethodHandler[Any, Any]:
    """Ends a call of whatever kind without reading its request, which may be as large as a message can be."""

    async def refuse(requests: Any, context: Any) -> None:
        raise refused

    handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(refuse)
    return handler
