"""Serves the HTTP API with uvicorn on the running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn

from services.common.settings import split_address
from services.gateway.http.app import create_app
from services.gateway.http.ports import Engine, HttpSettings
from services.gateway.http.protocol import BoundedHttpProtocol
from services.gateway.identity import Identity

log = logging.getLogger("quire.http")

KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that the client closes first and no request meets a closing one."""

SEND_BUFFER_BYTES = 128 * 1024
"""What the kernel holds of an answer that its client does not read, so that such clients are noticed soon.

Left alone it grows to megabytes for each. Clients far away still get 128 KiB a round trip, and answers are small.
"""


class HttpServer:
    """A running server; made by `serve_http`."""

    def __init__(self, server: _Server, task: asyncio.Task[None], address: str) -> None:
        self._server = server
        self._task = task
        self.address = address  # host:port that it serves on

    async def stop(self) -> None:
        """Refuses new connections, lets running answers end within `drain_seconds`, then cancels the rest."""
        self._server.ending.set()
        await self._task


async def serve_http(engine: Engine, identity: Identity, settings: HttpSettings) -> HttpServer:
    """Serves on `http_listen`; connections are accepted at once. SystemExit where the address cannot be used."""
    listener = _bind(settings.http_listen)
    host, port = listener.getsockname()[:2]
    config = uvicorn.Config(
        create_app(engine, identity, settings),
        http=BoundedHttpProtocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(settings.drain_seconds),
    )
    config.load()
    server = _Server(config)
    task = asyncio.create_task(server.serve([listener]))
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    log.info("serving http", extra={"address": address})
    return HttpServer(server, task, address)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ending = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals belong to the gateway

    async def main_loop(self) -> None:
        """uvicorn's own wakes ten times a second; for the date header once is enough."""
        while not self.ending.is_set():
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ending.wait(), 1.0)


def _bind(address: str) -> socket.socket:
    try:
        host, port = split_address(address)
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, target = min(found, key=lambda one: one[0] != socket.AF_INET)  # IPv4 where both are
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit it
            listener.bind(target)
            listener.listen(2048)
        except BaseException:
            listener.close()
            raise
    except (OSError, ValueError) as error:
        raise SystemExit(f"http_listen: cannot serve on {address}: {error}") from error
    listener.setblocking(False)
    return listener
