"""`quire keys`, and how commands show a key."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from quire import cli
from services.gateway.identity import Caller, digest_of
from services.gateway.key_file import read_keys
from tests.unit.cli.conftest import Gateway


def new(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[str, str]:
    """Standard output and the key that the other stream showed."""
    assert cli.main(["keys", "new", *flags]) == 0
    said = capsys.readouterr()
    return said.out, said.err.split()[-1]


def test_new_keys_make_a_file_that_holds_only_digests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.toml"
    first, acme = new(capsys, "acme")
    second, operator = new(capsys, "ops", "--admin")
    path.write_text("[tenants.acme]\nweight = 2\n" + first + second)
    assert read_keys(path) == {digest_of(acme): Caller("acme", 2.0), digest_of(operator): Caller("ops", admin=True)}
    assert acme != operator
    assert len(acme) > 40
    assert acme not in path.read_text()


def test_a_key_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keys", "new", "acme", "--json"]) == 0
    said = capsys.readouterr()
    made = json.loads(said.out)
    assert tomllib.loads(made["toml"])["keys"] == [{"tenant": "acme", "sha256": digest_of(made["key"]).hex()}]
    assert (made["tenant"], said.err) == ("acme", "")


@pytest.mark.parametrize("name", ["", "a b", 'a"', "-a", "x" * 65, "a\n"])
def test_a_tenant_s_name_is_checked(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["keys", "new", "--", name])
    assert end.value.code == 2
    assert "tenant's name" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["flag", "variable"])
def test_commands_show_the_key(gateway: tuple[Gateway, str], monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    made, address = gateway
    flags = ["--api-key", "qk-a"] if way == "flag" else []
    monkeypatch.setenv("QUIRE_API_KEY", "qk-b")
    cli.main(["status", "--json", "--address", address, *flags])
    assert made.authorizations == [f"Bearer {'qk-a' if way == 'flag' else 'qk-b'}"]


def test_what_cannot_be_a_key_is_refused_without_repeating_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "sécret")
    with pytest.raises(SystemExit, match="printable ASCII") as end:
        cli.main(["status", "--address", "127.0.0.1:9"])
    assert "sécret" not in str(end.value.code)


def test_up_refuses_a_bad_file_of_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[[keys]]\ntenant = 'acme'")
    with pytest.raises(SystemExit) as end:
        cli.main(["up", "--keys", str(path)])
    assert end.value.code == 2
    assert f"{path}: keys[0].sha256" in capsys.readouterr().err
