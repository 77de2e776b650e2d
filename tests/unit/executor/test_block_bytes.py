"""Blocks as bytes, on each backend and in each format: what was written elsewhere, a step reads the same."""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
import pytest
import torch

from services.executor.backends.base import StepInputs
from services.executor.loader import LoadedModel, make_loader
from services.executor.settings import ExecutorSettings
from tests.fixtures.models import make_rand_model

SIZE = 32
BLOCKS = 12  # in each format
TOKENS = np.random.default_rng(5).integers(0, 256, 3 * SIZE).astype(np.int32)
BACKENDS = [("torch", "fp32", "fp32"), ("torch", "bf16", "bf16"), ("cpu", "fp32", "fp32"), ("cpu", "fp32", "bf16")]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    torch.set_num_threads(1)
    return make_rand_model(tmp_path_factory.mktemp("rand"), 3)


@pytest.fixture(scope="module", params=BACKENDS, ids="-".join)
def model(path, request) -> LoadedModel:
    backend, dtype, kv_format = request.param
    asked = {"backend": backend, "dtype": dtype, "kv_format": kv_format, "kv": "hot+warm+cold", "kv_blocks": BLOCKS}
    made = make_loader(ExecutorSettings.model_validate(asked | {"threads": 1}))("rand", str(path))
    assert (made.backend.name, made.backend.kv_format) == (backend, kv_format)
    return made


def logits(model: LoadedModel, tokens, start: int, table: list[int]):
    """Of one sequence's tokens from `start` on, which they are written at."""
    end = start + len(tokens)
    inputs = StepInputs(
        token_ids=np.array(tokens, np.int32),
        positions=np.arange(start, end, dtype=np.int32),
        query_starts=np.array([0, len(tokens)], np.int32),
        context_lengths=np.array([end], np.int32),
        block_tables=np.array([table], np.int32),
        samples=[],
    )
    return model.backend.logits(inputs, range(len(tokens)))


def test_a_block_has_the_bytes_that_its_pool_states(model):
    sizes = [model.shape.block_bytes, *(pool.block_bytes for pool in model.shape.colder)]
    for size, (first, end) in zip(sizes, pairwise(model.shape.pool_starts), strict=True):
        assert [len(model.backend.read_block(block)) for block in (first, end - 1)] == [size, size]
    assert sizes == sorted(sizes, reverse=True)


def test_any_bytes_come_back_and_touch_no_other_block(model):
    draw = np.random.default_rng(1)
    ids = range(model.shape.pool_starts[-1])
    written = {block: draw.bytes(len(model.backend.read_block(block))) for block in ids}
    for block in draw.permutation(len(written)).tolist():
        model.backend.write_block(block, memoryview(written[block]))
    assert all(model.backend.read_block(block) == written[block] for block in ids)


def test_a_size_that_is_not_the_blocks_is_refused(model):
    for size in (1, model.shape.block_bytes - 1, model.shape.block_bytes + 1):
        with pytest.raises(ValueError, match=f"{model.shape.block_bytes} bytes, not {size}"):
            model.backend.write_block(0, memoryview(bytes(size)))


@pytest.mark.parametrize("age", [0, 1, 2], ids=["hot", "warm", "cold"])
def test_a_block_that_went_out_and_came_back_reads_the_same(model, age):
    """The second block of a context is read in a format, where it lay first and where its bytes were written to."""
    starts = model.shape.pool_starts
    logits(model, TOKENS, 0, [0, 1, 2])
    place = 1
    for colder in range(1, age + 1):
        model.backend.demote_blocks([(place, starts[colder] + 3)])
        place = starts[colder] + 3
    query = TOKENS[:5]
    expected = logits(model, query, len(TOKENS), [0, place, 2, 4])
    block = bytes(model.backend.read_block(place))
    away = starts[age] + 7
    model.backend.write_block(away, memoryview(block))
    model.backend.write_block(place, memoryview(bytes(len(block))))
    assert not np.array_equal(logits(model, query, len(TOKENS), [0, place, 2, 4]), expected)
    assert np.array_equal(logits(model, query, len(TOKENS), [0, away, 2, 4]), expected)
    assert model.backend.read_block(away) == block


def test_blocks_move_while_steps_run(model):
    """Another thread writes and reads blocks of every pool that the steps do not use."""
    backend, starts = model.backend, model.shape.pool_starts
    logits(model, TOKENS, 0, [0, 1, 2])
    query = TOKENS[:5]
    expected = logits(model, query, len(TOKENS), [0, 1, 2, 4])
    stopping, wrong, moved = threading.Event(), [], threading.Semaphore(0)

    def move() -> None:
        draw = np.random.default_rng(2)
        while not stopping.is_set():
            for first in starts[:-1]:
                block = draw.bytes(len(backend.read_block(first + 8)))
                backend.write_block(first + 9, memoryview(block))
                if backend.read_block(first + 9) != block:
                    wrong.append(first)
            moved.release()

    mover = threading.Thread(target=move)
    mover.start()
    try:
        for _ in range(10):
            assert moved.acquire(timeout=20)
            assert np.array_equal(logits(model, query, len(TOKENS), [0, 1, 2, 4]), expected)
    finally:
        stopping.set()
        mover.join()
    assert not wrong
