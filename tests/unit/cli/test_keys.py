"""`quire keys`, and how commands show a key."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from quire import cli
from services.gateway.caller import Caller, Entry, Scope, digest_of, key_id
from services.gateway.keys.file import KeyFile
from tests.unit.cli.conftest import Gateway


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def said(capsys: pytest.CaptureFixture[str], *arguments: str, path: Path) -> Any:
    assert cli.main(["keys", *arguments, "--keys", str(path), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_created_keys_open_and_only_their_digests_are_kept(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    acme = said(capsys, "create", "acme", path=path)
    operator = said(capsys, "create", "ops", "--scope", "admin", "--scope", "metrics", path=path)
    assert (acme["tenant"], acme["scopes"], acme["expires"]) == ("acme", ["infer"], None)
    assert acme["id"] == key_id(digest_of(acme["key"]))
    assert acme["key"] != operator["key"]
    assert len(acme["key"]) > 40
    text = path.read_text()
    assert acme["key"] not in text
    assert operator["key"] not in text
    keys = KeyFile(path)
    assert keys.roster.find(digest_of(acme["key"])) == Entry(Caller("acme", acme["id"]))
    scopes = frozenset({Scope.ADMIN, Scope.METRICS})
    assert keys.roster.find(digest_of(operator["key"])) == Entry(Caller("ops", operator["id"], scopes=scopes))


def test_a_key_is_shown_once_and_revoked_by_its_id(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keys", "create", "acme", "--keys", str(path)]) == 0
    key = capsys.readouterr().out.split()[-1]
    keys = KeyFile(path)
    assert keys.roster.find(digest_of(key)) is not None
    other = said(capsys, "create", "acme", path=path)
    listed = said(capsys, "list", path=path)
    assert [one["id"] for one in listed] == [key_id(digest_of(key)), other["id"]]
    assert cli.main(["keys", "list", "--keys", str(path)]) == 0
    table = capsys.readouterr().out
    assert listed[0]["id"] in table
    assert key not in table
    assert said(capsys, "revoke", listed[0]["id"], path=path) == {"id": listed[0]["id"], "revoked": True}
    assert keys.roster.find(digest_of(key)) is None
    assert keys.roster.find(digest_of(other["key"])) is not None


@pytest.mark.parametrize(("text", "hours"), [("36h", 36), ("90d", 90 * 24)])
def test_a_key_expires_after_a_while(path: Path, capsys: pytest.CaptureFixture[str], text: str, hours: int) -> None:
    said(capsys, "create", "acme", "--expires", text, path=path)
    [key] = said(capsys, "list", path=path)
    left = datetime.fromisoformat(key["expires"]) - datetime.now(UTC)
    assert timedelta(hours=hours, minutes=-2) < left <= timedelta(hours=hours)


@pytest.mark.parametrize(("text", "why"), [("soon", "nor a date"), ("0d", "nor a date"), ("2020-01-01", "is past")])
def test_when_a_key_expires_is_checked(path: Path, capsys: pytest.CaptureFixture[str], text: str, why: str) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["keys", "create", "acme", "--keys", str(path), "--expires", text])
    assert end.value.code == 2
    assert why in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize("name", ["", "a b", 'a"', "-a", "x" * 65, "a\n"])
def test_a_tenant_s_name_is_checked(path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["keys", "create", "--keys", str(path), "--", name])
    assert end.value.code == 1
    assert "tenant's name" in capsys.readouterr().err
    assert not path.exists()


def test_what_goes_wrong_is_one_line(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keys", "list", "--keys", str(path)]) == 0
    assert capsys.readouterr().out == "no keys\n"
    path.write_text("[[keys]]\n")
    for action in (["list"], ["create", "acme"], ["revoke", "0123"]):
        with pytest.raises(SystemExit) as end:
            cli.main(["keys", *action, "--keys", str(path)])
        assert end.value.code == 1
        assert "keys[0].tenant" in capsys.readouterr().err
    assert path.read_text() == "[[keys]]\n"


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


def test_up_refuses_a_bad_file_of_keys(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text("[[keys]]\ntenant = 'acme'")
    with pytest.raises(SystemExit) as end:
        cli.main(["up", "--keys", str(path)])
    assert end.value.code == 2
    assert f"{path}: keys[0].sha256" in capsys.readouterr().err
