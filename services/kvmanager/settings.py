"""Settings of the kvmanager."""

from __future__ import annotations

from pydantic import Field

from services.common.settings import ServiceSettings


class KvManagerSettings(ServiceSettings):
    """Serves the kvmanager: block pools, prefix reuse, placement and leases."""

    listen: str = Field("127.0.0.1:50053", description="address to serve gRPC on: host:port or unix:PATH")
    metrics_listen: str = Field("127.0.0.1:9103", description="host:port of the Prometheus endpoint; empty serves none")
    lease_seconds: float = Field(10.0, gt=0, le=3600, description="how long a lost scheduler's blocks stay held")
