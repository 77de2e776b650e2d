"""Settings: what is wrong is said in one line, by name, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.settings import ServiceSettings, load
from services.executor.settings import ExecutorSettings
from services.gateway.settings import GatewaySettings
from services.kvmanager.settings import KvManagerSettings
from services.scheduler.settings import SchedulerSettings


@pytest.mark.parametrize(
    ("cls", "flag", "said"),
    [
        (KvManagerSettings, "--listen=here", "listen: here is neither host:port"),
        (KvManagerSettings, "--listen=127.0.0.1:99999", "listen: 127.0.0.1:99999 is neither host:port"),
        (KvManagerSettings, "--metrics-listen=127.0.0.1", "metrics_listen: 127.0.0.1 is neither host:port"),
        (GatewaySettings, "--http-listen=127.0.0.1:http", "http_listen: 127.0.0.1:http is neither host:port"),
        (GatewaySettings, "--scheduler=", "scheduler: String should have at least 1 character"),
        (SchedulerSettings, "--kvmanager=", "kvmanager: String should have at least 1 character"),
        (SchedulerSettings, "--executors=", "executors: Tuple should have at least 1 item"),
        (KvManagerSettings, "--listen=0.0.0.0:1", "listen: 0.0.0.0:1 is reachable from elsewhere"),
        (KvManagerSettings, "--lease-seconds=long", "lease_seconds: Input should be a valid number"),
        (KvManagerSettings, "--config", "--config needs a file"),
        (KvManagerSettings, "--tls-ca=", "tls_ca: an empty path names nothing"),
        (KvManagerSettings, "--tls-ca=/nowhere/ca.pem", "tls_ca: no such file: /nowhere/ca.pem"),
        (KvManagerSettings, f"--namespace-quotas=a={'9' * 400}", "namespace_quotas: '999"),
        (ExecutorSettings, "--kv-disk=", "kv_disk: an empty path names nothing"),
        (ExecutorSettings, f"--kv-memory={'9' * 400}", "kv_memory: '999"),
        (ExecutorSettings, "--kv-hot-tokens=1000000000", "kv_hot_tokens: Input should be less than 1000000000"),
        (ExecutorSettings, "--kv-blocks=300000000", "kv_blocks: Input should be less than or equal to 268435456"),
        (ExecutorSettings, "--numa-node=-1", "numa_node: -1 is neither auto, none nor the number of a node"),
        (ExecutorSettings, "--numa-node=x", "numa_node: x is neither auto, none nor the number of a node"),
    ],
)
def test_wrong_values_are_refused_by_name(
    cls: type[ServiceSettings], flag: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        load(cls, "role", [flag])
    assert refused.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"quire serve role: {said}")
    assert error.count("\n") == 1


def test_flags_go_before_environment_and_environment_before_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kvmanager.toml"
    file.write_text('lease_seconds = 3.0\nlisten = "unix:/tmp/a"\nlog_level = "error"\n')
    monkeypatch.setenv("QUIRE_KVMANAGER_LISTEN", "[::1]:7")
    monkeypatch.setenv("QUIRE_KVMANAGER_LEASE_SECONDS", "4")
    settings = load(KvManagerSettings, "kvmanager", ["--config", str(file), "--lease-seconds", "5"])
    assert (settings.lease_seconds, settings.listen, settings.log_level) == (5.0, "[::1]:7", "error")


def test_variables_that_nobody_reads_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("QUIRE_KVMANAGER_LEASE", "QUIRE_LEASE_SECONDS", "QUIRE_KVMANAGER_PORT_50053_TCP", "QUIRE_CACHE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("QUIRE_KVMANAGER_EVENT_HISTORY", "7")
    assert load(KvManagerSettings, "kvmanager", []).event_history == 7
    assert capsys.readouterr().err.splitlines() == [
        "quire serve kvmanager: QUIRE_KVMANAGER_LEASE is ignored: there is no such setting",
        "quire serve kvmanager: QUIRE_LEASE_SECONDS is ignored: the variable of this setting is "
        "QUIRE_KVMANAGER_LEASE_SECONDS",
    ]
