"""The document of keys: what it says, what is refused, and how it is edited."""

from __future__ import annotations

import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pytest

from services.common.errors import QuireError
from services.common.limits import MAX_PRIORITY
from services.gateway.caller import Caller, Entry, Scope, digest_of, key_id
from services.gateway.identity import Identity
from services.gateway.keys.document import Roster, parse, roster_of
from services.gateway.keys.editing import entry_text, with_key, without_key
from services.gateway.keys.file import FilePlace, KeyFile

A, B, C = (digest_of(key) for key in ("qk-a", "qk-b", "qk-c"))
MANY = "".join(f'[[keys]]\ntenant = "t"\nsha256 = "{digest_of(str(n)).hex()}"\n' for n in range(1000))


def entry(digest: bytes, tenant: str = "acme", more: str = "") -> str:
    return f'[[keys]]\ntenant = "{tenant}"\nsha256 = "{digest.hex()}"\n{more}\n'


class Fixed(NamedTuple):
    """A source that does not change."""

    roster: Roster


def written(folder: Path, text: str) -> Path:
    path = folder / "keys.toml"
    path.write_text(text)
    return path


def test_keys_of_a_tenant_share_what_the_tenant_may() -> None:
    tenant = "[tenants.acme]\nweight = 3\nmax_priority = 7\n"
    more = 'scopes = ["admin", "metrics"]\nexpires = 1970-01-01T01:00:05+01:00'
    roster = roster_of(parse(entry(A) + entry(B, more=more) + tenant + entry(C, "other")))
    assert len(roster) == 3
    assert roster.find(A) == Entry(Caller("acme", key_id(A), 3.0, 7))
    all_but_infer = frozenset({Scope.ADMIN, Scope.METRICS})
    assert roster.find(B) == Entry(Caller("acme", key_id(B), 3.0, 7, all_but_infer), 5.0)
    assert roster.find(C) == Entry(Caller("other", key_id(C)))
    assert roster.find(digest_of("qk-d")) is None


def test_every_one_of_many_keys_is_found() -> None:
    roster = roster_of(parse(MANY))
    assert all(roster.find(digest_of(str(n))) is not None for n in range(1000))
    assert not any(roster.find(digest_of(f"other {n}")) for n in range(1000))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "keys: "),
        ("keys = []", "keys: "),
        ("[[keys]\n", "line 1"),
        (entry(A, ""), r"keys\[0\]\.tenant"),
        (entry(A, "a b"), r"keys\[0\]\.tenant"),
        (entry(A, "x" * 65), r"keys\[0\]\.tenant"),
        ('[[keys]]\ntenant = "a"', r"keys\[0\]\.sha256"),
        (entry(A).replace(A.hex(), A.hex().upper()), r"keys\[0\]\.sha256"),
        (entry(A) + entry(B[:31]), r"keys\[1\]\.sha256"),
        (entry(A) + entry(A, "other"), r"keys\[1\]\.sha256: is there twice"),
        (entry(A, more='scopes = "admin"'), r"keys\[0\]\.scopes"),
        (entry(A, more="scopes = []"), r"keys\[0\]\.scopes"),
        (entry(A, more='scopes = ["root"]'), r"keys\[0\]\.scopes\[0\]"),
        (entry(A, more="expires = 2030-01-01"), r"keys\[0\]\.expires"),
        (entry(A, more="expires = 2030-01-01T00:00:00"), r"keys\[0\]\.expires.*timezone"),
        (entry(A, more='expires = "2030-01-01T00:00:00Z"'), r"keys\[0\]\.expires"),
        (entry(A, more="weight = 2"), r"keys\[0\]\.weight"),
        (entry(A) + "[tenants.acmee]\nweight = 2", r"tenants\.acmee: no key"),
        *(
            (entry(A) + f"[tenants.acme]\nweight = {weight}", r"tenants\.acme\.weight")
            for weight in ("0", "-1", "inf", "nan", "1e7", '"1"', "true")
        ),
        *(
            (entry(A) + f"[tenants.acme]\nmax_priority = {priority}", r"tenants\.acme\.max_priority")
            for priority in ("-1", str(MAX_PRIORITY + 1), "1.5", '"1"')
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=named) as caught:
        KeyFile(path)
    assert str(path) in str(caught.value)


def test_a_key_in_the_place_of_its_digest_is_not_repeated() -> None:
    with pytest.raises(ValueError, match="sha256") as caught:
        parse('[[keys]]\ntenant = "acme"\nsha256 = "qk-secret"\n')
    assert "qk-secret" not in str(caught.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["missing", "no text"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "keys.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"keys\.toml"):
        KeyFile(path)


def test_the_file_is_followed(tmp_path: Path) -> None:
    path = written(tmp_path, entry(A))
    keys = KeyFile(path)
    assert keys.roster.find(A) == Entry(Caller("acme", key_id(A)))
    assert keys.roster.find(B) is None

    with path.open("a") as file:
        file.write(entry(B, "other"))
    assert keys.roster.find(B) == Entry(Caller("other", key_id(B)))

    new = tmp_path / "new.toml"
    new.write_text(entry(C))
    os.replace(new, path)
    assert keys.roster.find(C) == Entry(Caller("acme", key_id(C)))
    assert keys.roster.find(A) is None, "a key that was taken out still opens"


@pytest.mark.parametrize("broken", ["[[keys]", None], ids=["no TOML", "gone"])
def test_a_broken_file_changes_nothing_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str | None
) -> None:
    path = written(tmp_path, entry(A))
    keys = KeyFile(path)
    if broken is None:
        path.unlink()
    else:
        path.write_text(broken)
    assert [keys.roster.find(A) for _ in range(3)] == [Entry(Caller("acme", key_id(A)))] * 3
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    path.write_text(entry(B))
    assert keys.roster.find(A) is None
    assert keys.roster.find(B) == Entry(Caller("acme", key_id(B)))


async def test_a_key_expires_by_the_clock() -> None:
    roster = roster_of(parse(entry(A, more="expires = 1970-01-01T00:01:00Z")))
    now = 59.9
    identity = Identity(Fixed(roster), lambda: now)
    assert (await identity.caller(["Bearer qk-a"])).tenant == "acme"
    now = 60.0
    with pytest.raises(QuireError, match="expired"):
        await identity.caller(["Bearer qk-a"])


def test_editing_leaves_all_else_as_people_wrote_it() -> None:
    head, mine = "# ours\n[tenants.acme] # two keys\nweight = 2.0\n\n", "  # not a key\n" + entry(A)
    text = with_key(head + mine.rstrip(), entry_text("acme", "qk-b", ["admin"], None, datetime(2030, 1, 1, tzinfo=UTC)))
    assert text.startswith(head + mine.rstrip())
    assert [(key.scopes, key.expires) for key in parse(text).keys] == [
        (["infer"], None),
        (["admin"], datetime(2030, 1, 1, tzinfo=UTC)),
    ]
    assert parse(without_key(text, key_id(A))).keys == parse(text).keys[1:]
    assert without_key(text, key_id(B)).strip() == (head + mine).strip()


def test_a_key_between_tables_goes_alone() -> None:
    text = entry(A, "one") + entry(B, "two") + "[tenants.one]\nweight = 2\n" + entry(C, "three")
    for gone in (B, C):
        after = parse(without_key(text, key_id(gone)))
        assert {key.sha256 for key in after.keys} == {one.hex() for one in (A, B, C) if one != gone}
        assert after.tenants == parse(text).tenants


def test_what_cannot_be_revoked_is_said() -> None:
    with pytest.raises(ValueError, match="no key has the id 0000"):
        without_key(entry(A), "0000")
    with pytest.raises(ValueError, match="the only key"):
        without_key(entry(A), key_id(A))
    with pytest.raises(ValueError, match=r"last key of acme: take out \[tenants.acme\]"):
        without_key(entry(A) + entry(B, "b") + "[tenants.acme]\nweight = 2", key_id(A))
    inline = f'keys = [{{tenant = "a", sha256 = "{A.hex()}"}}, {{tenant = "a", sha256 = "{B.hex()}"}}]'
    with pytest.raises(ValueError, match="only a person"):
        without_key(inline, key_id(A))


def test_editors_come_in_turn_and_the_file_stays_private(tmp_path: Path) -> None:
    place = FilePlace(tmp_path / "keys.toml")

    def add(number: int) -> None:
        place.edit(lambda text: with_key(text, entry_text("t", f"qk-{number}", ["infer"], None, None)))

    threads = [threading.Thread(target=add, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(parse(place.read()).keys) == 20
    assert (tmp_path / "keys.toml").stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [tmp_path / "keys.toml"]
