"""Several models, pools and callers in one process."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kernels import _native
from tests.fixtures.models import make_rand_model
from tests.native.packed_models import PackedModel, pack_model
from tests.native.runs import Logits, Runs, ids_of

ROUNDS = 6


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    path = make_rand_model(tmp_path_factory.mktemp("target") / "model", 1, head_size=32, intermediate=160)
    return pack_model(path, "q4mg32")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    """Another shape and format."""
    path = make_rand_model(tmp_path_factory.mktemp("draft") / "model", 2, layers=1, heads=3, kv_heads=1)
    return pack_model(path)


def talk(runs: Runs, seed: int) -> Logits:
    """A prompt in two chunks, some decodes beside a neighbour; all its logits."""
    ids = ids_of(seed, 60)
    parts = [runs.feed({0: ids[:37]})[0], runs.feed({0: ids[37:50], 1: ids[:20]})[0]]
    parts += [runs.feed({0: [token], 1: [token]})[0] for token in ids[50:]]
    runs.forget(0)
    runs.forget(1)
    return np.concatenate(parts)


@pytest.mark.parametrize("threads", [1, 2, 3, 9, 33])
def test_any_number_of_threads(target: PackedModel, threads: int) -> None:
    """More than there are cores, and more than there are pieces of work."""
    assert np.array_equal(talk(Runs(target, threads=threads), 1), talk(Runs(target, threads=1), 1))


@pytest.mark.parametrize("threads", [1, 2])
def test_two_models_share_a_pool(target: PackedModel, draft: PackedModel, threads: int) -> None:
    """Stepped from a thread each, while a third has its bad steps refused."""
    models = (target, draft)
    expected = [[talk(Runs(model), seed) for seed in range(ROUNDS)] for model in models]
    pool = _native.ThreadPool(threads)
    assert pool.size == threads
    done = threading.Event()

    def play(model: PackedModel) -> list[Logits]:
        runs = Runs(model, threads=pool)
        return [talk(runs, seed) for seed in range(ROUNDS)]

    def disturb() -> int:
        runs, count = Runs(draft, threads=pool), 0
        while not done.is_set():
            with pytest.raises(ValueError, match="token_ids"):
                runs.feed({count: [-1]})
            runs.forget(count)
            count += 1
        return count

    with ThreadPoolExecutor(3) as callers:
        disturbed = callers.submit(disturb)
        found = list(callers.map(play, models))
        done.set()
        assert disturbed.result() > 0
    for some, others in zip(found, expected, strict=True):
        assert all(np.array_equal(one, other) for one, other in zip(some, others, strict=True))


def test_models_come_and_go_while_another_runs(target: PackedModel, draft: PackedModel) -> None:
    pool, done = _native.ThreadPool(2), threading.Event()
    expected, expected_draft = talk(Runs(target), 3), talk(Runs(draft), 4)

    def play() -> int:
        runs, count = Runs(target, threads=pool), 0
        while not done.is_set():
            assert np.array_equal(talk(runs, 3), expected)
            count += 1
        return count

    with ThreadPoolExecutor(1) as caller:
        played = caller.submit(play)
        for _ in range(ROUNDS):
            runs = Runs(draft, threads=pool)
            assert np.array_equal(talk(runs, 4), expected_draft)
            del runs
            Runs(draft, threads=pool)
        done.set()
        assert played.result() > 0


def test_what_a_model_reads_lives_as_long_as_it(tmp_path: Path) -> None:
    """Weights and pool are held by the model alone, and go with it."""
    path = make_rand_model(tmp_path / "model")
    packed = pack_model(path)
    expected = talk(Runs(packed), 5)
    buffer = weakref.ref(packed.weights.buffer.base)
    runs = Runs(packed, threads=2)
    del packed
    gc.collect()
    junk = [np.full(1 << 20, 255, np.uint8) for _ in range(8)]
    assert np.array_equal(talk(runs, 5), expected)
    assert buffer() is not None
    del runs, junk
    gc.collect()
    assert buffer() is None


def test_pools_end_idle_asleep_or_unused(draft: PackedModel) -> None:
    before = thread_count()
    for _ in range(30):
        _native.ThreadPool(4)
    expected = talk(Runs(draft), 6)
    runs = Runs(draft, threads=3)
    for pause in (0.0, 0.1, 0.3):  # idle threads sleep after a while
        time.sleep(pause)
        assert np.array_equal(talk(runs, 6), expected)
    assert thread_count() == before + 2
    time.sleep(0.2)
    del runs
    gc.collect()
    for _ in range(100):  # the system lists a thread a moment longer than it runs
        if thread_count() == before:
            break
        time.sleep(0.01)
    assert thread_count() == before


def thread_count() -> int:
    """Threads of this process, native ones too."""
    return len(list(Path("/proc/self/task").iterdir()))
