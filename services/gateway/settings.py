"""Settings of the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from services.common.settings import NamedPath, RedisUrl, ServiceSettings, check_listen, is_loopback

KEYS_IN_REDIS = Path("redis")


class GatewaySettings(ServiceSettings):
    """The gateway: the public edge, gRPC and OpenAI HTTP."""

    listen: str = Field("127.0.0.1:50051", description="address to serve gRPC on: host:port or unix:PATH")
    http_listen: str = Field("127.0.0.1:8000", description="host:port of the OpenAI HTTP API; empty serves none")
    metrics_listen: str = Field("127.0.0.1:9101", description="host:port of the Prometheus endpoint; empty serves none")
    scheduler: str = Field(
        "127.0.0.1:50052", min_length=1, description="address of the scheduler, or of several with commas between"
    )
    keys: NamedPath | None = Field(
        None, description='file of API keys (`quire keys`), or "redis" for those in --redis; without: one tenant'
    )
    redis: RedisUrl | None = Field(None, description="redis://HOST:PORT that gateways share limits, usage and keys in")
    redis_lost: Literal["open", "closed"] = Field(
        "open", description="without Redis: each gateway counts for itself, or refuses whom limits are set for"
    )
    resume_window: float = Field(
        0.0, ge=0, le=3600, description="for so many seconds a stream goes on without its client, which may come back"
    )
    journal: Literal["memory", "redis"] = Field(
        "memory", description="where those streams are kept: here, or in --redis for all gateways"
    )
    max_queue_seconds: float = Field(
        300.0, ge=0, description="new requests that would wait longer are refused; 0: none are"
    )
    max_open_tokens: int = Field(
        1 << 24, ge=1, description="prompt tokens of all open requests, 2048 each at least; more are refused"
    )
    slow_seconds: float = Field(
        60.0, ge=0, description="to a first token; a scheduler that mostly takes longer is left alone; 0: never"
    )
    hedge_seconds: float = Field(
        0.0, ge=0, description="ask a second scheduler where a request has not begun after that; 0: never"
    )
    max_prompt_bytes: int = Field(8 << 20, ge=1, le=32 << 20, description="largest prompt, in bytes of text")
    max_body_bytes: int = Field(16 << 20, ge=1, le=64 << 20, description="largest HTTP body")
    resume_seconds: float = Field(30.0, ge=0, description="how long requests wait for a lost scheduler")
    hold_tokens: int = Field(1024, ge=1, description="unread tokens at which a request is held")
    slow_reader_seconds: float = Field(30.0, gt=0, description="how long a client may leave tokens unread")
    tool_style: Literal["auto", "hermes", "llama"] = Field(
        "auto", description="how models write calls of tools; auto: as their chat templates show"
    )
    encode_threads: int = Field(2, ge=1, le=64, description="threads that tokenize")

    @property
    def keys_in_redis(self) -> bool:
        return self.keys == KEYS_IN_REDIS

    @property
    def schedulers(self) -> tuple[str, ...]:
        """Their addresses, each once."""
        return tuple(dict.fromkeys(part.strip() for part in self.scheduler.split(",") if part.strip()))

    @model_validator(mode="after")
    def _check_streams(self) -> Self:
        if not self.schedulers:
            raise ValueError("scheduler: names no address")
        if self.journal == "redis" and (self.redis is None or not self.resume_window):
            raise ValueError("journal: redis needs the address of one in the setting redis, and a resume_window")
        return self

    @model_validator(mode="after")
    def _check_access(self) -> Self:
        if self.keys_in_redis and self.redis is None:
            raise ValueError("keys: redis needs the address of one in the setting redis")
        known = self.keys is not None or self.tls_ca is not None or self.trust_network
        if not known and not is_loopback(self.listen):
            raise ValueError(f"listen: {self.listen} is reachable by anybody; set keys, tls_ca or trust_network")
        address = self.http_listen
        if address:
            check_listen("http_listen", address)
        if address and not is_loopback(address) and not self.trust_network:
            raise ValueError(
                f"http_listen: {address} is reachable from elsewhere; set trust_network on private networks"
            )
        return self
