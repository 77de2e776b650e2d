"""The file of keys: what it says, what is refused, and that it is followed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.common.limits import MAX_PRIORITY
from services.gateway.identity import Caller, digest_of
from services.gateway.key_file import KeyFile, read_keys

A, B, C = (digest_of(key) for key in ("qk-a", "qk-b", "qk-c"))


def entry(digest: bytes, tenant: str = "acme", more: str = "") -> str:
    return f'[[keys]]\ntenant = "{tenant}"\nsha256 = "{digest.hex()}"\n{more}\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "keys.toml"
    path.write_text(text)
    return path


def test_keys_of_a_tenant_share_what_the_tenant_may(tmp_path: Path) -> None:
    tenant = "[tenants.acme]\nweight = 3\nmax_priority = 7\n"
    text = entry(A) + entry(B, more="admin = true") + tenant + entry(C, "other")
    assert read_keys(written(tmp_path, text)) == {
        A: Caller("acme", 3.0, 7, admin=False),
        B: Caller("acme", 3.0, 7, admin=True),
        C: Caller("other", 1.0, 0, admin=False),
    }


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
        (entry(A, more='admin = "yes"'), r"keys\[0\]\.admin"),
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
        read_keys(path)
    assert str(path) in str(caught.value)


def test_a_key_in_the_place_of_its_digest_is_not_repeated(tmp_path: Path) -> None:
    path = written(tmp_path, '[[keys]]\ntenant = "acme"\nsha256 = "qk-secret"\n')
    with pytest.raises(ValueError, match="sha256") as caught:
        read_keys(path)
    assert "qk-secret" not in str(caught.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["missing", "no text"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "keys.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"keys\.toml"):
        KeyFile(path)


async def test_the_file_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path, entry(A))
    keys = KeyFile(path)
    assert await keys.find(A) == Caller("acme")
    assert await keys.find(B) is None

    with path.open("a") as file:  # as `quire keys new >> keys.toml` does
        file.write(entry(B, "other"))
    assert await keys.find(B) == Caller("other")

    new = tmp_path / "new.toml"
    new.write_text(entry(C))
    os.replace(new, path)
    assert await keys.find(C) == Caller("acme")
    assert await keys.find(A) is None, "a key that was taken out still opens"


@pytest.mark.parametrize("broken", ["[[keys]", None], ids=["no TOML", "gone"])
async def test_a_broken_file_changes_nothing_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str | None
) -> None:
    path = written(tmp_path, entry(A))
    keys = KeyFile(path)
    if broken is None:
        path.unlink()
    else:
        path.write_text(broken)
    assert [await keys.find(A) for _ in range(3)] == [Caller("acme")] * 3
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    path.write_text(entry(B))
    assert await keys.find(A) is None
    assert await keys.find(B) == Caller("acme")
