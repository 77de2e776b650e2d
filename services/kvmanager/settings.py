"""Settings of the kvmanager."""

from __future__ import annotations

from pydantic import Field, field_validator

from services.common.settings import ServiceSettings
from services.kvmanager.retention import parse_quotas


class KvManagerSettings(ServiceSettings):
    """Serves the kvmanager: block pools, prefix reuse, placement and leases."""

    listen: str = Field("127.0.0.1:50053", description="address to serve gRPC on: host:port or unix:PATH")
    metrics_listen: str = Field("127.0.0.1:9103", description="host:port of the Prometheus endpoint; empty serves none")
    lease_seconds: float = Field(10.0, gt=0, le=3600, description="how long a lost scheduler's blocks stay held")
    namespace_quotas: str = Field(
        "", description="cached KV beyond which a namespace loses its own first, in each pool: a=25%,b=2GiB"
    )
    event_history: int = Field(
        16384, ge=0, description="KV events kept for followers that come late; 0 switches events off"
    )

    @field_validator("namespace_quotas")
    @classmethod
    def _check_quotas(cls, value: str) -> str:
        parse_quotas(value)
        return value
