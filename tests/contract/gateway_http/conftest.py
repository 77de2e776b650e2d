from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.gateway.http.server import HttpServer, serve_http
from services.gateway.identity import Identity
from tests.unit.gateway_http.fake_engine import FakeEngine, Settings


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def server(engine: FakeEngine) -> AsyncIterator[HttpServer]:
    """A real server on a free port."""
    server = await serve_http(engine, Identity(None), Settings())
    yield server
    await server.stop()
