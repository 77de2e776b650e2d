"""Where the gateway may serve."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from services.gateway.settings import GatewaySettings


def test_defaults_serve_loopback_only() -> None:
    settings = GatewaySettings()
    assert (settings.listen, settings.http_listen) == ("127.0.0.1:50051", "127.0.0.1:8000")
    assert (settings.scheduler, settings.metrics_listen) == ("127.0.0.1:50052", "127.0.0.1:9101")


@pytest.mark.parametrize("field", ["listen", "http_listen", "metrics_listen"])
def test_other_addresses_need_a_stated_trust(field: str) -> None:
    with pytest.raises(ValidationError, match=f"{field}: 0.0.0.0"):
        GatewaySettings.model_validate({field: "0.0.0.0:1"})
    assert GatewaySettings.model_validate({field: "0.0.0.0:1", "trust_network": True})


def test_beyond_loopback_tls_alone_does_not_say_who_asks(tmp_path: Path) -> None:
    certificate, key, authority = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem"))
    for path in (certificate, key, authority):
        path.touch()
    given = {"listen": "0.0.0.0:1", "tls_cert": certificate, "tls_key": key}
    with pytest.raises(ValidationError, match=r"listen: 0\.0\.0\.0:1 is reachable by anybody"):
        GatewaySettings.model_validate(given)
    for more in ({"keys": tmp_path / "keys.toml"}, {"tls_ca": authority}, {"trust_network": True}):
        assert GatewaySettings.model_validate(given | more)


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_prompt_bytes", 0), ("hold_tokens", 0), ("slow_reader_seconds", 0), ("resume_seconds", -1)],
)
def test_wrong_values_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValidationError, match=field):
        GatewaySettings.model_validate({field: value})


def test_several_schedulers_are_named_with_commas() -> None:
    settings = GatewaySettings(scheduler="a:1, b:2,,a:1")
    assert settings.schedulers == ("a:1", "b:2")
    with pytest.raises(ValidationError, match="scheduler: names no address"):
        GatewaySettings(scheduler=" , ")


@pytest.mark.parametrize("given", [{}, {"redis": "redis://h:1"}, {"resume_window": 5}])
def test_a_shared_journal_needs_redis_and_a_window(given: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="journal: redis needs"):
        GatewaySettings.model_validate({"journal": "redis"} | given)
    assert GatewaySettings.model_validate({"journal": "redis", "redis": "redis://h:1", "resume_window": 5})
