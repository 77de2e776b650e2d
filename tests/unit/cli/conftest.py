"""A gateway that states what a test tells it to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from quire.v1 import admin_pb2, admin_pb2_grpc, gateway_pb2, gateway_pb2_grpc, types_pb2


class Gateway(admin_pb2_grpc.AdminServiceServicer, gateway_pb2_grpc.InferenceServiceServicer):
    """States what it is told to."""

    def __init__(self) -> None:
        self.status = admin_pb2.GetStatusResponse(version="1")
        self.authorizations: list[Any] = []  # of the calls for the status
        self.models: list[types_pb2.ModelDescription] = []
        self.usage: list[admin_pb2.UsageRow] = []
        self.usage_asked: list[admin_pb2.GetUsageRequest] = []
        self.change_executor: Callable[[Any, Any], admin_pb2.ChangeExecutorResponse] | None = None

    def GetStatus(self, request: Any, context: Any) -> admin_pb2.GetStatusResponse:
        self.authorizations.append(dict(context.invocation_metadata()).get("authorization"))
        return self.status

    def ListModels(self, request: Any, context: Any) -> gateway_pb2.ListModelsResponse:
        return gateway_pb2.ListModelsResponse(models=self.models)

    def GetUsage(self, request: Any, context: Any) -> admin_pb2.GetUsageResponse:
        self.usage_asked.append(request)
        return admin_pb2.GetUsageResponse(rows=self.usage)

    def ChangeExecutor(self, request: Any, context: Any) -> admin_pb2.ChangeExecutorResponse:
        assert self.change_executor is not None
        return self.change_executor(request, context)


@pytest.fixture
def gateway() -> Iterator[tuple[Gateway, str]]:
    made, server = Gateway(), grpc.server(futures.ThreadPoolExecutor(1))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(made, server)
    gateway_pb2_grpc.add_InferenceServiceServicer_to_server(made, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield made, f"127.0.0.1:{port}"
    server.stop(0)
