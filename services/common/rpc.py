"""gRPC channels and servers: message limits, credentials, health, reflection, start and drain."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, start_http_server

from services.common.errors import ErrorInterceptor
from services.common.settings import ServiceSettings, split_address

log = logging.getLogger("quire.rpc")

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""The most that one message may weigh on any hop; prompts are refused long before."""

OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a taken port must fail, not be shared
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # a ping of gRPC's own, unanswered, would hold keepalive back for a minute
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3_000),  # the most that one attempt may take: a peer may accept and say nothing
]


def channel(target: str, settings: ServiceSettings) -> grpc.aio.Channel:
    """A channel to host:port, dns:///, unix: or xds:/// with the service's credentials."""
    if settings.tls_cert is None or settings.tls_key is None or target.startswith("unix:"):
        return grpc.aio.insecure_channel(target, options=OPTIONS)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=settings.tls_ca.read_bytes() if settings.tls_ca else None,
        private_key=settings.tls_key.read_bytes(),
        certificate_chain=settings.tls_cert.read_bytes(),
    )
    return grpc.aio.secure_channel(target, credentials, options=OPTIONS)


class Server:
    """One service's gRPC server. SERVING is stated by `set_ready`, never by the open port alone.

    Readiness is "" and each service name. "liveness" is SERVING as long as the event loop answers, unless `set_alive`
    says that what the service computes with has stopped.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        services: Sequence[ServiceDescriptor],
        registry: CollectorRegistry,
        guard: grpc.aio.ServerInterceptor | None = None,
    ) -> None:
        """`guard` sees every call before its handler does, and may refuse it by a QuireError."""
        self.settings = settings
        self._registry = registry
        self.grpc = grpc.aio.server(interceptors=[ErrorInterceptor(), *([guard] if guard else [])], options=OPTIONS)
        self._names = [service.full_name for service in services]
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflection.enable_server_reflection([*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self.grpc)
        self._ready = self._draining = False

    async def start(self) -> None:
        """Binds and serves, not yet ready. SystemExit, with a clear line, for unusable TLS files and taken ports."""
        await self.set_ready(False)
        await self.set_alive(True)
        settings = self.settings
        _check_tls(settings)
        try:
            if settings.tls_cert is None or settings.tls_key is None or settings.listen.startswith("unix:"):
                self.grpc.add_insecure_port(settings.listen)
            else:
                authorities = settings.tls_ca.read_bytes() if settings.tls_ca else None
                pair = (settings.tls_key.read_bytes(), settings.tls_cert.read_bytes())
                self.grpc.add_secure_port(
                    settings.listen, grpc.ssl_server_credentials([pair], authorities, authorities is not None)
                )
        except RuntimeError as error:
            raise SystemExit(
                f"listen: cannot serve on {settings.listen}: the address is taken or not this machine's ({error})"
            ) from error
        await self.grpc.start()
        if settings.metrics_listen:
            try:
                host, port = split_address(settings.metrics_listen)
                start_http_server(
                    port,
                    host,
                    registry=self._registry,
                    certfile=_path(settings.tls_cert),
                    keyfile=_path(settings.tls_key),
                    client_cafile=_path(settings.tls_ca),
                    client_auth_required=settings.tls_ca is not None,
                )
            except (OSError, ValueError) as error:
                raise SystemExit(f"metrics_listen: cannot serve on {settings.metrics_listen}: {error}") from error
        gc.collect()
        gc.freeze()  # what the imports brought stays: no collection need walk it again

    async def set_ready(self, ready: bool) -> None:
        """States readiness for "" and every service name. Once a drain has begun it stays NOT_SERVING."""
        self._ready = ready and not self._draining
        for name in ("", *self._names):
            await self._tell(name, self._ready)

    async def set_alive(self, alive: bool) -> None:
        """States liveness: without it, whoever watches over the process may start it anew."""
        await self._tell("liveness", alive)

    @property
    def ready(self) -> bool:
        return self._ready

    async def _tell(self, name: str, serving: bool) -> None:
        state = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(name, state)

    async def run_until_signal(self, drain: Callable[[], Awaitable[None]] | None = None) -> None:
        """Serves until SIGTERM or SIGINT, then drains: readiness, `drain`, calls; a second signal ends at once."""
        stop, now = asyncio.Event(), asyncio.Event()

        def on_signal() -> None:
            (now if stop.is_set() else stop).set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        await stop.wait()
        log.info("draining", extra={"seconds": self.settings.drain_seconds})
        self._draining = True
        await self.set_ready(False)

        async def finish() -> None:
            if drain is not None:
                try:
                    await asyncio.wait_for(drain(), self.settings.drain_seconds)
                except TimeoutError:
                    log.warning("what still runs is cut off: drain_seconds are over")
            await self.grpc.stop(self.settings.drain_seconds if drain is None else 1.0)

        ending, forced = asyncio.create_task(finish()), asyncio.create_task(now.wait())
        await asyncio.wait({ending, forced}, return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        if ending.done():
            ending.result()
        else:
            ending.cancel()
            await self.grpc.stop(0)
        log.info("stopped")


def _check_tls(settings: ServiceSettings) -> None:
    """Raises SystemExit naming the files that are at fault: of these gRPC says only that it cannot bind."""
    if settings.tls_cert is None or settings.tls_key is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    names = "tls_cert, tls_key"
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")  # asks nobody for one
        if settings.tls_ca is not None:
            names = "tls_ca"
            context.load_verify_locations(settings.tls_ca)
    except OSError as error:
        raise SystemExit(f"{names}: cannot be used: {error}") from error


def _path(file: Path | None) -> str | None:
    return str(file) if file is not None else None
