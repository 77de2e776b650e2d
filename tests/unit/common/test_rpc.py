"""What every service's server does: readiness, drains, addresses."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from services.common.rpc import Server
from services.common.settings import ServiceSettings, split_address


def made(tmp_path: Path, drain_seconds: float = 5.0) -> Server:
    fields = {"listen": f"unix:{tmp_path}/s.sock", "metrics_listen": "", "drain_seconds": drain_seconds}
    return Server(ServiceSettings.model_validate(fields), [], CollectorRegistry())


async def test_tls_files_that_hold_no_certificate_are_named(tmp_path: Path) -> None:
    """The port is free: nobody should look for what has taken it."""
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_text("no certificate")
    tls = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    settings = ServiceSettings.model_validate({"listen": "127.0.0.1:0", "metrics_listen": ""} | tls)
    with pytest.raises(SystemExit, match="tls_cert, tls_key: cannot be used"):
        await Server(settings, [], CollectorRegistry()).start()


async def test_drain_withdraws_readiness_for_good(tmp_path: Path) -> None:
    """A model that arrives or a peer that returns meanwhile must not bring new requests."""
    server = made(tmp_path)
    await server.start()
    await server.set_ready(True)
    seen = []

    async def drain() -> None:
        await server.set_ready(True)
        seen.append(server.ready)

    running = asyncio.create_task(server.run_until_signal(drain))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    await running
    assert seen == [False]


async def test_drain_that_breaks_is_not_a_clean_end(tmp_path: Path) -> None:
    server = made(tmp_path)
    await server.start()

    async def drain() -> None:
        raise RuntimeError("broken")

    running = asyncio.create_task(server.run_until_signal(drain))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(RuntimeError, match="broken"):
        await running
    await server.grpc.stop(0)


async def test_drain_that_takes_too_long_is_cut_off_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = made(tmp_path, drain_seconds=0.05)
    await server.start()
    running = asyncio.create_task(server.run_until_signal(lambda: asyncio.sleep(60)))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 10)
    assert "drain_seconds are over" in caplog.text


@pytest.mark.parametrize(
    ("address", "parts"), [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:0", ("::1", 0)), (":65535", ("", 65535))]
)
def test_addresses_are_split(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize("address", ["localhost", "localhost:", "localhost:http", "localhost:65536", "localhost:-1"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        split_address(address)
