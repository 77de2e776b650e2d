"""Keys of blocks: framed fields, chained, the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from hashlib import sha256

import pytest

from services.kvmanager.keys import ROOT, KeySpace, block_keys, pack

SPACE = KeySpace("model", "tenant", "policy", "adapter")
TOKENS = array("i", [1, 2, 3, 2**31 - 1, 5, 6, 7])


def keys_of(space: KeySpace, tokens: array[int] = TOKENS, group: int = 0, size: int = 2) -> list[bytes]:
    return block_keys(space.prefix(group), ROOT, pack(tokens, 0, len(tokens)), size)


def test_a_key_is_the_hash_of_its_framed_fields() -> None:
    def framed(*fields: bytes) -> bytes:
        return b"".join(len(field).to_bytes(8, "little") + field for field in fields)

    parent = b""
    expected = []
    for start in (0, 2, 4):
        tokens = b"".join(token.to_bytes(4, "little") for token in TOKENS[start : start + 2])
        parent = sha256(framed(b"model", b"7", b"policy", b"tenant", b"adapter", parent, tokens)).digest()
        expected.append(parent)
    assert keys_of(SPACE, group=7) == expected


def test_a_chain_can_be_continued() -> None:
    whole = keys_of(SPACE)
    rest = block_keys(SPACE.prefix(0), whole[0], pack(TOKENS, 2, len(TOKENS)), 2)
    assert whole[1:] == rest


def test_every_token_before_changes_the_key() -> None:
    other = TOKENS[:]
    other[0] += 1
    assert not set(keys_of(SPACE)) & set(keys_of(SPACE, other))


@pytest.mark.parametrize(
    "other",
    [
        KeySpace("other", "tenant", "policy", "adapter"),
        KeySpace("model", "other", "policy", "adapter"),
        KeySpace("model", "tenant", "other", "adapter"),
        KeySpace("model", "tenant", "policy", "other"),
    ],
)
def test_every_field_changes_the_key(other: KeySpace) -> None:
    assert not set(keys_of(SPACE)) & set(keys_of(other))


def test_groups_and_block_sizes_have_keys_of_their_own() -> None:
    assert not set(keys_of(SPACE)) & set(keys_of(SPACE, group=1))
    assert not set(keys_of(SPACE)) & set(keys_of(SPACE, size=3))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (KeySpace("m", "t1", adapter="23"), KeySpace("m", "t12", adapter="3")),
        (KeySpace("m", "t1", "23"), KeySpace("m", "t12", "3")),
        (KeySpace("m", "23", "t1"), KeySpace("m", "3", "t12")),
        (KeySpace("m1", "x"), KeySpace("m", "1x")),
        (KeySpace("m", "x"), KeySpace("m", "", "x")),
    ],
)
def test_f5_no_field_runs_into_the_next(one: KeySpace, two: KeySpace) -> None:
    """F5: tenant "t1" with "23" and tenant "t12" with "3" share nothing."""
    assert not set(keys_of(one)) & set(keys_of(two))


def test_f7_keys_are_equal_in_processes_with_other_hash_seeds() -> None:
    """F7: keys do not depend on PYTHONHASHSEED."""
    code = (
        "from array import array\n"
        "from services.kvmanager.keys import *\n"
        "space = KeySpace('model', 'tenant', 'policy', 'adapter')\n"
        f"tokens = {TOKENS!r}\n"
        "print(hash('x'), *(k.hex() for k in block_keys(space.prefix(0), ROOT, pack(tokens, 0, len(tokens)), 2)))\n"
    )
    lines = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]
    assert lines[0][0] != lines[1][0], "the seeds make no difference: the test shows nothing"
    assert lines[0][1:] == lines[1][1:] == [key.hex() for key in keys_of(SPACE)]
