"""Vectors of prompts: what the core pools, and what both backends make of a model's states, against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kernels import _native
from quire.v1 import types_pb2
from quire.v1.types_pb2 import Pooling
from services.common.errors import QuireError, Reason
from services.executor.backends.base import Backend, KvShape, StepInputs
from services.executor.backends.cpu.backend import CpuBackend
from services.executor.backends.torch_backend import TorchBackend
from services.executor.embedding import Embedding
from services.executor.models.checkpoint import open_checkpoint
from tests.fixtures.models import make_rand_model
from tests.unit.executor.conftest import Bench
from tests.unit.executor.plans import ends, state

LAST, MEAN = Pooling.POOLING_LAST, Pooling.POOLING_MEAN
BUDGET = 1e-5
"""Largest difference of a value in fp32."""
SIZE, BLOCKS = 32, 8
IDS = [int(token) for token in np.random.default_rng(3).integers(0, 256, 90)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rand_model(tmp_path_factory.mktemp("rand"), 3)


def expected(path: Path, pooling: Pooling.ValueType) -> NDArray[np.float64]:
    """The vector that transformers' states give."""
    import transformers

    torch.set_num_threads(1)
    model = transformers.AutoModel.from_pretrained(path)
    with torch.no_grad():
        states = model(torch.tensor([IDS])).last_hidden_state[0].double().numpy()
    vector = states[-1] if pooling == LAST else states.mean(0)
    return vector / np.linalg.norm(vector)


def vector(backend: Backend, pooling: Pooling.ValueType, chunks: Sequence[int]) -> list[float]:
    """A prompt's vector, computed in chunks of that many tokens beside a sequence that is no part of it."""
    embedding = Embedding(pooling, len(IDS), backend.spec.hidden_size)
    tables = np.arange(2 * BLOCKS, dtype=np.int32).reshape(2, BLOCKS)[::-1].copy()
    start = 0
    for step, count in enumerate(chunks):
        end = start + count
        part = embedding.rows(1, start, count)
        backend.step(
            StepInputs(
                token_ids=np.array([7, *IDS[start:end]], np.int32),
                positions=np.array([step, *range(start, end)], np.int32),
                query_starts=np.array([0, 1, 1 + count], np.int32),
                context_lengths=np.array([step + 1, end], np.int32),
                block_tables=tables,
                samples=[],
                pooled=[] if part is None else [part],
            )
        )
        start = end
    return embedding.vector()


def load(kind: str, path: Path, instruction_set: str = "auto", threads: int = 1) -> Backend:
    checkpoint = open_checkpoint(path)
    backend: Backend
    if kind == "torch":
        backend = TorchBackend.load(checkpoint, dtype="fp32", threads=1, context_length=None, device="cpu")
    else:
        backend = CpuBackend.load(checkpoint, dtype="fp32", instruction_set=instruction_set, threads=threads)
    backend.allocate_kv(KvShape(SIZE, backend.kv_block_bytes(SIZE), 2 * BLOCKS))
    return backend


@pytest.mark.parametrize("pooling", [LAST, MEAN], ids=["last", "mean"])
@pytest.mark.parametrize("kind", ["torch", *_native.instruction_sets()])
def test_the_vector_is_that_of_transformers_however_it_is_cut(
    path: Path, pooling: Pooling.ValueType, kind: str
) -> None:
    backend = load("torch", path) if kind == "torch" else load("cpu", path, kind)
    whole = vector(backend, pooling, [90])
    assert np.abs(np.array(whole) - expected(path, pooling)).max() < BUDGET
    assert np.linalg.norm(whole) == pytest.approx(1)
    for chunks in ([64, 26], [1, 48, 40, 1], [7] * 12 + [6]):
        assert vector(backend, pooling, chunks) == whole


def test_threads_change_nothing(path: Path) -> None:
    alone = vector(load("cpu", path), MEAN, [90])
    assert vector(load("cpu", path, threads=3), MEAN, [50, 40]) == alone


def test_rows_that_are_not_there_are_refused(path: Path) -> None:
    model = load("cpu", path)._model  # type: ignore[attr-defined]
    size = load("cpu", path).spec.hidden_size
    arrays = [np.array(values, np.int32) for values in ([7], [0], [0, 1], [1])]
    none = np.zeros(0, np.int32)
    for part, what in (
        ((1, 1, np.zeros(size)), "pooled row"),
        ((-1, 1, np.zeros(size)), "pooled row"),
        ((0, -1, np.zeros(size)), "pooled row"),
        ((2**31 - 1, 2**31 - 1, np.zeros(size)), "pooled row"),
        ((0, 1, np.zeros(size - 1)), "hidden size"),
    ):
        with pytest.raises(ValueError, match=what):
            model.step(*arrays, np.zeros((1, 1), np.int32), none, [], none, [], pooled=[part])
    for wrong in ((0, 1), (0, 1, np.zeros(size, np.float32)), (0, 1, [0.0] * size), 3):
        with pytest.raises(TypeError, match="pooled must hold"):
            model.step(*arrays, np.zeros((1, 1), np.int32), none, [], none, [], pooled=[wrong])


def test_states_without_a_direction_have_no_vector() -> None:
    for value in (0.0, np.nan, np.inf):
        embedding = Embedding(LAST, 1, 4)
        part = embedding.rows(0, 0, 1)
        assert part is not None
        part.total += value
        with pytest.raises(QuireError) as caught:
            embedding.vector()
        assert caught.value.reason is Reason.NOT_FINITE


def test_a_sequence_ends_with_its_prompt(bench: Bench) -> None:
    """It shares its steps with others, draws nothing, and is gone."""
    pooled = state(1, range(1, 41), range(10), max_tokens=1)
    pooled.pooling = MEAN
    other = state(2, [5, 6], range(10, 14), max_tokens=4)
    bench.take(enter=[pooled, other], grants=[(1, 16, 3), (2, 8, 1), (2, 1, 3)])
    sent = bench.run()
    end = ends(sent)[1]
    assert (end.reason, end.HasField("stop_token_id")) == (types_pb2.FINISH_REASON_STOP, False)
    [(message, embedding)] = [(one, found) for one in sent for found in one.embeddings]
    assert end in message.ended
    assert embedding.sequence_id == 1
    # Each state of the fake model is its token and its position.
    states = np.array([[token, position, 1, 0, 0, 0, 0, 0] for position, token in enumerate(range(1, 41))], float)
    mean = states.mean(0)
    assert np.allclose(embedding.values, mean / np.linalg.norm(mean))
    told = [dict(zip(one.sequence_ids, one.computed_lengths, strict=True)) for one in sent]
    assert [lengths[1] for lengths in told if 1 in lengths][-1] == 40
    assert not any(count for one in sent for i, count in zip(one.sequence_ids, one.token_counts, strict=True) if i == 1)
    assert not bench.core.sequences
    assert ends(sent)[2].reason == types_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize(
    ("fields", "changes", "field"),
    [
        ({}, {"pooling": 9}, "pooling"),
        ({"computed": 1}, {"pooling": LAST}, "pooling"),
        ({"output": [3]}, {"pooling": LAST}, "pooling"),
        ({"prompt_logprobs": 1}, {"pooling": MEAN}, "pooling"),
        ({}, {"pooling": MEAN, "constraint": types_pb2.Constraint(regex="a")}, "pooling"),
    ],
)
def test_what_does_not_go_with_a_vector_is_refused(
    bench: Bench, fields: dict[str, object], changes: dict[str, object], field: str
) -> None:
    entering = state(1, [5, 6, 7], range(4), **fields)  # type: ignore[arg-type]
    entering.MergeFrom(type(entering)(**changes))  # type: ignore[arg-type]
    bench.take(enter=[entering], grants=[(1, 8, 1)])
    error = ends(bench.run())[1].error
    assert error.reason == "INVALID_FIELD"
    assert error.message.startswith(f"{field}:")
