"""Settings: defaults that the other services expect, and values that are refused by name."""

import pytest

from services.common.settings import describe, load
from services.executor.settings import ExecutorSettings


def test_defaults():
    settings = load(ExecutorSettings, "executor", [])
    assert (settings.listen, settings.metrics_listen, settings.kvmanager) == (
        "127.0.0.1:50054",
        "127.0.0.1:9104",
        "127.0.0.1:50053",
    )
    assert (settings.max_sequences, settings.max_step_tokens, settings.block_size) == (64, 512, 32)
    assert settings.model is None


def test_flags_and_environment(monkeypatch):
    monkeypatch.setenv("QUIRE_EXECUTOR_KV_MEMORY", "2GiB")
    settings = load(
        ExecutorSettings, "executor", ["--model", "m", "--model-name", "n", "--kvmanager", "", "--threads", "3"]
    )
    assert (settings.model, settings.model_name, settings.kvmanager) == ("m", "n", "")
    assert (settings.kv_memory, settings.threads) == ("2GiB", 3)


def test_formats_by_age():
    assert str(load(ExecutorSettings, "executor", []).kv_policy) == ""
    assert str(load(ExecutorSettings, "executor", ["--kv", "hot+warm"]).kv_policy) == "hot:512,int8"
    asked = ["--kv", "hot+warm+cold", "--kv-hot-tokens", "256", "--kv-warm-tokens", "384"]
    assert str(load(ExecutorSettings, "executor", asked).kv_policy) == "hot:256,int8:384,int4"


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--kv-memory", "much"], "kv_memory"),
        (["--kv-blocks", "0"], "kv-blocks"),
        (["--kv-disk-size", "much"], "kv_disk_size"),
        (["--kv-host-memory", "auto"], "kv_host_memory"),
        (["--kv-remote", "http://127.0.0.1"], "kv_remote"),
        (["--kv-remote", "redis://:secret@127.0.0.1/abc"], "kv_remote"),
        (["--dtype", "int3"], "dtype"),
        (["--backend", "abacus"], "backend"),
        (["--max-step-tokens", "8"], "max_step_tokens"),
        (["--model-name", "x"], "model_name"),
        (["--context-length", "1"], "context-length"),
        (["--kv", "cold"], "kv"),
        (["--kv", "hot+warm+cold", "--kv-hot-tokens", "1921"], "kv_warm_tokens"),
        (["--kv", "hot+warm", "--block-size", "24"], "block_size"),
    ],
)
def test_wrong_values_are_refused_by_name(argv, named, capsys):
    with pytest.raises(SystemExit) as raised:
        load(ExecutorSettings, "executor", argv)
    assert raised.value.code == 2
    assert named.replace("-", "_") in capsys.readouterr().err.replace("-", "_")


def test_a_remote_stores_password_is_not_printed():
    settings = load(ExecutorSettings, "executor", ["--kv-remote", "redis://:secret@127.0.0.1:6379"])
    assert settings.kv_remote.get_secret_value() == "redis://:secret@127.0.0.1:6379"
    assert "secret" not in describe(settings)


@pytest.mark.parametrize(
    "url", ["redis://h", "redis://h:1/", "rediss://u:p@[::1]:1/15?timeout=3", "unix:///run/a?db=2"]
)
def test_addresses_of_remote_stores(url):
    assert load(ExecutorSettings, "executor", ["--kv-remote", url]).kv_remote.get_secret_value() == url
