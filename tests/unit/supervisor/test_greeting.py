"""What a person sees of a run that has come up, where callers need a key."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from quire.supervisor.rundir import RunState
from quire.supervisor.up import greet
from quire.v1 import gateway_pb2, gateway_pb2_grpc, types_pb2


class Locked(gateway_pb2_grpc.InferenceServiceServicer):
    """Lists a model to who shows the key."""

    def ListModels(self, request: Any, context: Any) -> gateway_pb2.ListModelsResponse:
        if dict(context.invocation_metadata()).get("authorization") != "Bearer qk-a":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the API key is not known")
        return gateway_pb2.ListModelsResponse(models=[types_pb2.ModelDescription(name="m")])


@pytest.fixture
def state() -> Iterator[RunState]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    gateway_pb2_grpc.add_InferenceServiceServicer_to_server(Locked(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield RunState(1, 0.0, "log", f"127.0.0.1:{port}", "http://127.0.0.1:1", models=["m"])
    server.stop(0)


@pytest.mark.parametrize(
    ("key", "asked_for", "failed"),
    [
        (None, True, ""),
        ("qk-a", False, ""),
        ("qk-b", False, "quire up: the first request failed: the API key is not known\n"),
    ],
)
async def test_a_run_with_keys(
    state: RunState,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    key: str | None,
    asked_for: bool,
    failed: str,
) -> None:
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("QUIRE_API_KEY", key)
    out = io.StringIO()
    await greet(state, out, demo=False)
    assert ("API keys" in out.getvalue()) is asked_for
    assert "quire chat" in out.getvalue()
    assert capsys.readouterr().err == failed
