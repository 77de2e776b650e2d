from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from services.gateway.http.app import create_app
from services.gateway.identity import Identity
from tests.unit.gateway_http.fake_engine import FakeEngine, Settings


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application, without sockets."""
    transport = httpx.ASGITransport(create_app(engine, Identity(None), Settings()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client
