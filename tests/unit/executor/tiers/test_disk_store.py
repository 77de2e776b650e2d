"""Blocks in a file: whole or not there, whatever happens to process, disk and bytes."""

import errno
import logging
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from services.executor.tiers.disk_store import DiskStore, slot_bytes
from services.executor.tiers.entry import HEADER_BYTES, identity_of
from services.executor.tiers.store import NO_KEY, Outcome, StoreError

BLOCK = 10_000
SLOTS = 6
STRIDE = slot_bytes(BLOCK)
IDENTITY = identity_of("model", "policy", "32")
HEADER_FIELDS = {"magic": 0, "identity": 8, "key": 24, "length": 56, "digest": 64, "check": 80}


def content(seed: int) -> memoryview:
    return memoryview(np.random.default_rng(seed).bytes(BLOCK))


def key(seed: int) -> bytes:
    return bytes([seed]) * 32


@pytest.fixture
def path(tmp_path):
    return tmp_path / "blocks.kv"


def open_store(path, identity=IDENTITY, slots=SLOTS) -> DiskStore:
    return DiskStore(path, identity, BLOCK, slots)


def filled(path, *seeds) -> None:
    store = open_store(path)
    for slot, seed in enumerate(seeds):
        store.write(slot, key(seed), content(seed))
    store.close()


def outcome_of(store, slot, wanted) -> Outcome:
    """Of reading it; DONE where exactly the right bytes come back."""
    try:
        block = store.read(slot, wanted)
    except StoreError as error:
        return error.outcome
    assert block == content(wanted[0])
    return Outcome.DONE


def test_what_is_written_is_read_and_replaced(path):
    store = open_store(path)
    assert outcome_of(store, 2, key(1)) is Outcome.MISSING
    store.write(2, key(1), content(1))
    assert outcome_of(store, 2, key(1)) is Outcome.DONE
    assert outcome_of(store, 2, key(2)) is Outcome.MISSING
    store.write(2, key(2), content(2))
    assert outcome_of(store, 2, key(1)) is Outcome.MISSING
    assert outcome_of(store, 2, key(2)) is Outcome.DONE
    assert outcome_of(store, 3, key(2)) is Outcome.MISSING
    store.close()


def test_a_restart_finds_what_was_there(path):
    filled(path, 1, 2, 3)
    store = open_store(path)
    assert store.found() == {0: key(1), 1: key(2), 2: key(3)}
    assert [outcome_of(store, slot, key(slot + 1)) for slot in range(3)] == [Outcome.DONE] * 3
    store.close()


def test_content_without_a_key_does_not_outlive_the_process(path):
    store = open_store(path)
    store.write(0, NO_KEY, content(0))
    assert outcome_of(store, 0, NO_KEY) is Outcome.DONE
    store.close()
    store = open_store(path)
    assert store.found() == {}
    assert outcome_of(store, 0, NO_KEY) is Outcome.MISSING
    store.close()


@pytest.mark.parametrize("fields", [("other model", "policy", "32"), ("model", "policy3", "2"), ("model", "", "32")])
def test_what_another_model_policy_or_block_size_left_is_discarded(path, fields):
    filled(path, 1, 2)
    store = open_store(path, identity_of(*fields))
    assert store.found() == {}
    assert outcome_of(store, 0, key(1)) is Outcome.MISSING
    store.close()
    assert open_store(path).found() == {}  # nor does it come back


def test_fewer_and_more_slots(path):
    filled(path, 1, 2, 3)
    store = open_store(path, slots=2)
    assert store.found() == {0: key(1), 1: key(2)}
    store.close()
    assert path.stat().st_size == 2 * STRIDE
    assert open_store(path, slots=9).found() == {0: key(1), 1: key(2)}


CUTS = [0, 1, 7, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + BLOCK // 2, HEADER_BYTES + BLOCK - 1]


@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_file_yields_no_half_entry(path, cut):
    filled(path, 1, 2)
    os.truncate(path, STRIDE + cut)
    for _ in range(2):  # the second time the file has its full length again
        store = open_store(path)
        assert store.found() == {0: key(1)}
        assert outcome_of(store, 0, key(1)) is Outcome.DONE
        assert outcome_of(store, 1, key(2)) is Outcome.MISSING
        store.close()


@pytest.mark.parametrize("cut", CUTS[1:])
def test_a_cut_under_an_open_store_is_noticed(path, cut):
    filled(path, 1, 2)
    store = open_store(path)
    os.truncate(path, STRIDE + cut)
    assert outcome_of(store, 1, key(2)) is not Outcome.DONE
    assert outcome_of(store, 0, key(1)) is Outcome.DONE
    store.close()


def flip(path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


@pytest.mark.parametrize("field", HEADER_FIELDS)
def test_a_flipped_bit_in_a_header_empties_the_slot(path, field):
    filled(path, 1, 2)
    flip(path, STRIDE + HEADER_FIELDS[field], 3)
    store = open_store(path)
    assert store.found() == {0: key(1)}
    assert outcome_of(store, 1, key(2)) is Outcome.MISSING
    store.close()


@pytest.mark.parametrize("at", [0, 1, BLOCK // 3, BLOCK - 1])
def test_a_flipped_bit_in_content_is_damage(path, at, caplog):
    filled(path, 1, 2)
    flip(path, STRIDE + HEADER_BYTES + at, 7)
    store = open_store(path)
    with caplog.at_level(logging.WARNING):
        assert outcome_of(store, 1, key(2)) is Outcome.DAMAGED
    assert "damaged" in caplog.text
    store.write(1, key(2), content(2))
    assert outcome_of(store, 1, key(2)) is Outcome.DONE
    store.close()


def test_a_header_over_other_content_is_damage(path):
    """A machine that dies may keep the header and lose the content."""
    filled(path, 1, 2)
    with path.open("r+b") as file:
        file.seek(STRIDE + HEADER_BYTES)
        file.write(content(1))
    store = open_store(path)
    assert outcome_of(store, 1, key(2)) is Outcome.DAMAGED
    store.close()


class Cut(Exception):
    """The process is gone."""


@pytest.mark.parametrize("cut", [*CUTS, HEADER_BYTES + BLOCK + 1, 2 * HEADER_BYTES + BLOCK - 1])
def test_a_write_that_stops_at_any_byte_leaves_nothing_or_all(path, monkeypatch, cut):
    filled(path, 1, 2)
    store = open_store(path)
    left, write = cut, os.pwrite

    def torn(file, data, at):
        nonlocal left
        if left < len(data):
            write(file, bytes(data[:left]), at)
            raise Cut
        left -= len(data)
        return write(file, data, at)

    monkeypatch.setattr(os, "pwrite", torn)
    with pytest.raises(Cut):
        store.write(1, key(3), content(3))
    monkeypatch.undo()
    store.close()
    store = open_store(path)
    assert store.found().get(1) in (None, key(2))
    assert outcome_of(store, 1, key(3)) is not Outcome.DONE
    assert (outcome_of(store, 1, key(2)) is Outcome.DONE) == (cut == 0)
    assert outcome_of(store, 0, key(1)) is Outcome.DONE
    store.close()


def test_short_writes_and_reads_are_completed(path, monkeypatch):
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, bytes(data[:977]), at))
    monkeypatch.setattr(os, "preadv", lambda file, parts, at: read(file, [parts[0][:501]], at))
    filled(path, 1, 2)
    store = open_store(path)
    assert outcome_of(store, 0, key(1)) is Outcome.DONE
    assert outcome_of(store, 1, key(2)) is Outcome.DONE
    store.close()


def test_a_full_disk_fails_writes_says_so_once_and_recovers(path, monkeypatch, caplog):
    filled(path, 1)
    store = open_store(path)
    write = os.pwrite

    def full(file, data, at):
        if len(data) > HEADER_BYTES:
            write(file, bytes(data[:4096]), at)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    with caplog.at_level(logging.INFO):
        for slot in (0, 1, 2):
            with pytest.raises(StoreError, match="No space left") as raised:
                store.write(slot, key(5), content(5))
            assert raised.value.outcome is Outcome.FULL
            assert outcome_of(store, slot, key(5)) is Outcome.MISSING
        monkeypatch.undo()
        store.write(0, key(5), content(5))
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert outcome_of(store, 0, key(5)) is Outcome.DONE
    store.close()


def test_a_file_size_limit_is_a_full_disk(path):
    """The kernel's own refusal, in a process of its own: the limit holds for the whole process."""
    script = f"""
        import resource
        from pathlib import Path
        from tests.unit.executor.tiers.test_disk_store import *
        store = open_store(Path({str(path)!r}))
        store.write(0, key(1), content(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, ({STRIDE + 5000}, {STRIDE + 5000}))
        try:
            store.write(1, key(2), content(2))
        except StoreError as error:
            print(error.outcome.value, outcome_of(store, 0, key(1)).value, outcome_of(store, 1, key(2)).value)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["full", "done", "missing"]


def test_a_killed_process_leaves_whole_entries_only(path):
    script = f"""
        from pathlib import Path
        from tests.unit.executor.tiers.test_disk_store import *
        store = open_store(Path({str(path)!r}))
        for turn in range(1_000_000):
            store.write(turn % SLOTS, key(turn % 251), content(turn % 251))
            if turn == 3 * SLOTS:
                print("going", flush=True)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        child.send_signal(signal.SIGKILL)
    store = open_store(path)
    assert len(store.found()) >= SLOTS - 1
    assert {outcome_of(store, slot, found) for slot, found in store.found().items()} == {Outcome.DONE}
    store.close()
