"""A token's logits are the same bits whatever ran beside it, however its sequence was cut, wherever its blocks lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from services.executor.backends.cpu.formats import group_size
from tests.fixtures.models import make_rand_model
from tests.native.packed_models import FORMATS, SETS, PackedModel, pack_model
from tests.native.runs import Logits, Runs, ids_of

CONTEXT = 1300
POISON = 255
"""A token of the poisoned model that makes every key, value and logit NaN."""
LARGEST = np.float32(3.3e38)
"""Overflows once a norm's gain above 1.03 multiplies it, in fp32 and in bf16."""


def sizes_of(format_: str) -> dict[str, int]:
    """A model whose matrices take the format: whole groups, and no more than that."""
    if group_size(format_) == 256:
        return {"hidden": 256, "heads": 4, "kv_heads": 2, "head_size": 64, "intermediate": 256}
    wide = 128 if format_.endswith("128") else 64
    return {"hidden": wide, "heads": 6, "kv_heads": 2, "head_size": wide // 2, "intermediate": 3 * wide}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("invariance")


def make_packed(folder: Path, format_: str) -> PackedModel:
    path = folder / format_
    if not path.exists():
        make_rand_model(path, 3, context_length=CONTEXT, **sizes_of(format_))
    return pack_model(path, format_)


def make_poisoned(folder: Path, format_: str) -> PackedModel:
    """A smaller model that knows POISON."""
    path = folder / "poisoned"
    if not path.exists():
        make_rand_model(path, 4, context_length=CONTEXT, heads=3, kv_heads=1, head_size=32)
        tensors = load_file(path / "model.safetensors")
        tensors["model.embed_tokens.weight"][POISON] = LARGEST
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return pack_model(path, format_)


def same(found: Logits, expected: Logits) -> bool:
    return np.array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("kv_format", ["f32", "bf16"])
def test_same_bits_alone_batched_chunked_and_copied(
    folder: Path, format_: str, kv_format: str, instruction_set: str
) -> None:
    packed = make_packed(folder, format_)
    assert format_ in packed.formats
    ids, others = ids_of(1, 70), {i: ids_of(i, 3 + 21 * i) for i in range(2, 6)}
    whole = Runs(packed, kv_format=kv_format, instruction_set=instruction_set).feed({0: ids})[0]
    for threads in (1, 3):
        runs = Runs(packed, kv_format=kv_format, instruction_set=instruction_set, threads=threads, seed=threads)
        # Pieces of every register tile's size, among neighbours that are fed at other places of their own.
        parts = [
            runs.feed({2: others[2], 0: ids[:1]})[0],
            runs.feed({0: ids[1:7], 3: others[3][:50]})[0],
            runs.feed({3: others[3][50:], 0: ids[7:12], 4: others[4]})[0],
            runs.whole(0, ids[12:26], 4),
            runs.feed({5: others[5], 0: ids[26:58], 2: [9]})[0],
        ]
        assert same(np.concatenate(parts), whole[:58])
        runs.copy(0, 1)  # one block is full, the other is not
        runs.forget(0)
        runs.feed({6: ids_of(6, 80)})  # over the blocks that sequence 0 had
        assert same(runs.feed({6: [1], 1: ids[58:69], 3: [2]})[1], whole[58:69]), "after a copy"
        assert same(runs.feed({1: ids[69:]})[1], whole[69:]), "after a copy"


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("kv_format", ["f32", "bf16"])
@pytest.mark.parametrize("format_", ["f32", "bf16"])
def test_what_blocks_held_before_never_shows(folder: Path, format_: str, kv_format: str, instruction_set: str) -> None:
    """Every slot holds NaN when a sequence gets it."""
    packed, ids = make_poisoned(folder, format_), ids_of(1, 75, POISON)
    clean = Runs(packed, kv_format=kv_format, instruction_set=instruction_set).feed({0: ids})[0]
    assert np.isfinite(clean).all()
    runs = Runs(packed, kv_format=kv_format, instruction_set=instruction_set, threads=2, block_count=8)
    assert np.isnan(runs.feed({1: [POISON] * 3})[1]).all()
    runs.fill(POISON, CONTEXT)
    runs.computed[9] = 32  # as if its first block were filled: all that it sees is NaN
    assert np.isnan(runs.feed({9: [1]})[9]).all()
    runs.forget(9)
    runs.fill(POISON, CONTEXT)
    chunks = [ids[:1], ids[1:3], ids[3:40], ids[40:65], ids[65:66], ids[66:]]
    # Beside a sequence of NaN, in the same step.
    found = [runs.feed({1: [POISON], 0: chunk, 2: [POISON, 3]})[0] for chunk in chunks]
    assert same(np.concatenate(found), clean)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("kv_format", ["f32", "bf16"])
def test_same_bits_in_long_contexts(folder: Path, kv_format: str, instruction_set: str) -> None:
    """Few tokens of long contexts are split among threads, many are not; splits end every 256 tokens."""
    path = folder / "long"
    if not path.exists():
        make_rand_model(path, 6, context_length=CONTEXT, layers=2, heads=3, kv_heads=1, head_size=32)
    packed, ids = pack_model(path), ids_of(1, 1100)
    whole = Runs(packed, kv_format=kv_format, instruction_set=instruction_set).feed({0: ids})[0]
    runs = Runs(packed, kv_format=kv_format, instruction_set=instruction_set, threads=3, seed=1)
    fed = 0
    for end in (255, 256, 257, 258, 500, 512, 515, 767, 770, 1000, 1023, 1024, 1025, 1026, 1100):
        assert same(runs.feed({0: ids[fed:end]})[0], whole[fed:end]), (fed, end)
        fed = end
    # Alone a decode is split; among 30 others it is not.
    runs.forget(0)
    runs.whole(0, ids[:1050], 350)
    for i in range(1, 31):
        runs.feed({i: ids_of(i, 5)})
    runs.copy(0, 31)
    alone = runs.feed({31: [ids[1050]]})[31]
    crowd = {i: [7] for i in range(1, 31)}
    together = runs.feed({**dict(list(crowd.items())[:11]), 0: [ids[1050]], **dict(list(crowd.items())[11:])})[0]
    assert same(alone, whole[1050:1051])
    assert same(together, whole[1050:1051])
