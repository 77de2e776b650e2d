"""The remote store, over a server that breaks as told and, where it is installed, the real one."""

import logging
import shutil
import subprocess
import time

import numpy as np
import pytest

from services.executor.tiers import redis_store
from services.executor.tiers.entry import HEADER_BYTES
from services.executor.tiers.redis_store import RedisStore
from services.executor.tiers.store import Outcome, StoreError
from services.kvmanager.keys import ROOT, KeySpace, block_keys
from tests.unit.executor.tiers.fake_redis import FakeRedis

BLOCK = 20_000
KEY = bytes(range(32))
MODEL, OTHER_MODEL = "ab" * 32, "cd" * 32


def content(seed: int) -> memoryview:
    return memoryview(np.random.default_rng(seed).bytes(BLOCK))


def outcome_of(call) -> Outcome:
    with pytest.raises(StoreError) as raised:
        call()
    return raised.value.outcome


@pytest.fixture
def fake():
    server = FakeRedis()
    yield server
    server.close()


@pytest.fixture
def real(tmp_path):
    """The address of a real server, without persistence."""
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server, a system package")
    path = tmp_path / "redis.sock"
    arguments = ["--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no", "--maxmemory", "4mb"]
    with subprocess.Popen(["redis-server", *arguments], stdout=subprocess.DEVNULL) as server:
        deadline = time.monotonic() + 20
        while not path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield f"unix://{path}"
        server.terminate()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def check_store(url: str) -> None:
    store = RedisStore(url, MODEL)
    assert outcome_of(lambda: store.get("bf16", KEY, BLOCK)) is Outcome.MISSING
    store.put("bf16", KEY, content(1))
    assert store.get("bf16", KEY, BLOCK) == content(1)
    store.put("bf16", KEY, content(1))
    assert store.get("bf16", KEY, BLOCK) == content(1)
    # Other formats, models and keys do not see it.
    assert outcome_of(lambda: store.get("int8", KEY, BLOCK)) is Outcome.MISSING
    assert outcome_of(lambda: store.get("bf16", KEY[::-1], BLOCK)) is Outcome.MISSING
    assert outcome_of(lambda: RedisStore(url, OTHER_MODEL).get("bf16", KEY, BLOCK)) is Outcome.MISSING
    # A second executor does.
    again = RedisStore(url, MODEL)
    assert again.get("bf16", KEY, BLOCK) == content(1)
    again.close()
    store.close()


def test_store_over_a_fake_server(fake):
    check_store(fake.url)


def test_store_over_a_real_server(real):
    check_store(real)


def test_a_real_server_that_is_full_says_so(real):
    store = RedisStore(real, MODEL)
    outcomes = set()
    for seed in range(250):
        try:
            store.put("bf16", bytes([seed]) * 32, content(seed))
        except StoreError as error:
            outcomes.add(error.outcome)
    assert outcomes == {Outcome.FULL}
    store.close()


def test_f5_tenants_never_meet(fake):
    """One prompt, two tenants whose names and salts join to the same text; then a restart."""
    tokens = np.arange(32, dtype="<i4").tobytes()
    keys = [
        block_keys(KeySpace(MODEL, *names).prefix(0), ROOT, tokens, 32)[0]
        for names in (("t1", "23"), ("t12", "3"), ("t123", ""), ("", "t123"))
    ]
    assert len(set(keys)) == 4
    store = RedisStore(fake.url, MODEL)
    store.put("bf16", keys[0], content(0))
    again = RedisStore(fake.url, MODEL)
    assert again.get("bf16", keys[0], BLOCK) == content(0)
    for other in keys[1:]:
        assert outcome_of(lambda key=other: again.get("bf16", key, BLOCK)) is Outcome.MISSING


def test_an_entry_under_the_wrong_name_is_refused(fake):
    store = RedisStore(fake.url, MODEL)
    store.put("bf16", KEY, content(1))
    (name,) = fake.values
    assert name == b"quire:kv:1:%s:bf16:%s" % (MODEL.encode(), KEY.hex().encode())
    fake.values[name.replace(KEY.hex().encode(), KEY[::-1].hex().encode())] = fake.values[name]
    assert outcome_of(lambda: store.get("bf16", KEY[::-1], BLOCK)) is Outcome.MISSING
    fake.values[name.replace(MODEL.encode(), OTHER_MODEL.encode())] = fake.values[name]
    assert outcome_of(lambda: RedisStore(fake.url, OTHER_MODEL).get("bf16", KEY, BLOCK)) is Outcome.DAMAGED


@pytest.mark.parametrize("cut", [0, 5, HEADER_BYTES, HEADER_BYTES + 1, BLOCK // 2, HEADER_BYTES + BLOCK - 1])
def test_f5_a_connection_cut_in_mid_store_leaves_nothing(fake, cut):
    clock = Clock()
    store = RedisStore(fake.url, MODEL, clock)
    fake.cut_after = max(cut, 200)  # names and commands get through
    assert outcome_of(lambda: store.put("bf16", KEY, content(1))) is Outcome.UNREACHABLE
    fake.cut_after = None
    clock.now += redis_store.FIRST_PAUSE
    assert outcome_of(lambda: store.get("bf16", KEY, BLOCK)) is Outcome.MISSING
    store.put("bf16", KEY, content(1))
    assert store.get("bf16", KEY, BLOCK) == content(1)


@pytest.mark.parametrize("kept", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + BLOCK - 1])
def test_f5_an_entry_that_a_server_kept_in_part_is_damage(fake, kept):
    store = RedisStore(fake.url, MODEL)
    fake.keeps = kept
    store.put("bf16", KEY, content(1))
    assert outcome_of(lambda: store.get("bf16", KEY, BLOCK)) is Outcome.DAMAGED


@pytest.mark.parametrize("at", [0, 8, 24, 56, 64, 80, HEADER_BYTES, HEADER_BYTES + BLOCK - 1])
def test_a_flipped_bit_is_damage(fake, at):
    store = RedisStore(fake.url, MODEL)
    store.put("bf16", KEY, content(1))
    (name, value), *_ = fake.values.items()
    fake.values[name] = value[:at] + bytes([value[at] ^ 4]) + value[at + 1 :]
    assert outcome_of(lambda: store.get("bf16", KEY, BLOCK)) is Outcome.DAMAGED


def test_a_lost_server_is_named_once_and_not_asked_in_vain(fake, caplog):
    clock = Clock()
    store = RedisStore(fake.url, MODEL, clock)
    fake.cut_after = 200
    with caplog.at_level(logging.INFO):
        assert outcome_of(lambda: store.put("bf16", KEY, content(1))) is Outcome.UNREACHABLE
        asked = len(fake.commands)
        for _ in range(5):
            assert outcome_of(lambda: store.get("bf16", KEY, BLOCK)) is Outcome.UNREACHABLE
        assert len(fake.commands) == asked
        clock.now += redis_store.FIRST_PAUSE
        assert outcome_of(lambda: store.put("bf16", KEY, content(1))) is Outcome.UNREACHABLE
        clock.now += redis_store.FIRST_PAUSE  # by now it pauses longer
        asked = len(fake.commands)
        assert outcome_of(lambda: store.get("bf16", KEY, BLOCK)) is Outcome.UNREACHABLE
        assert len(fake.commands) == asked
        fake.cut_after = None
        clock.now += redis_store.FIRST_PAUSE
        assert outcome_of(lambda: store.get("bf16", KEY, BLOCK)) is Outcome.MISSING
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_server_that_does_not_answer_is_given_up(fake, monkeypatch):
    monkeypatch.setattr(redis_store, "TRANSFER_SECONDS", 0.05)
    store = RedisStore(fake.url, MODEL)
    fake.silent = True
    assert outcome_of(lambda: store.get("bf16", KEY, BLOCK)) is Outcome.UNREACHABLE


def test_no_server_at_all(fake):
    fake.close()
    store = RedisStore(fake.url, MODEL)
    assert outcome_of(lambda: store.put("bf16", KEY, content(1))) is Outcome.UNREACHABLE


def test_a_full_server_is_not_a_lost_one(fake, caplog):
    store = RedisStore(fake.url, MODEL)
    fake.full = True
    assert outcome_of(lambda: store.put("bf16", KEY, content(1))) is Outcome.FULL
    fake.full = False
    store.put("bf16", KEY, content(1))
    assert store.get("bf16", KEY, BLOCK) == content(1)
    assert not caplog.records


def test_no_url():
    with pytest.raises(ValueError, match="URL"):
        RedisStore("http://127.0.0.1", MODEL)
