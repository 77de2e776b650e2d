"""What contradicts itself or the model is refused before anything is computed, and harms nothing that follows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from kernels import _native
from services.executor.backends.base import SampleRow, SamplingRule
from services.executor.backends.cpu.samplers import sampler_of
from tests.fixtures.models import make_rand_model
from tests.native.packed_models import SETS, PackedModel, pack_model
from tests.native.runs import Runs, ids_of

CONTEXT, BLOCKS = 128, 8
LEAST, MOST = -(2**31), 2**31 - 1
REFUSED = (ValueError, TypeError)

Step = dict[str, Any]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    return pack_model(make_rand_model(tmp_path_factory.mktemp("bad") / "model", 2, context_length=CONTEXT))


def ints(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


def sampler(vocab: int, **rule: Any) -> _native.Sampler:
    """Made when it is needed: the interpreter ends before what a module holds."""
    made = sampler_of(SampleRow(0, SamplingRule(**rule), [1], []), vocab)
    assert made is not None
    return made


class Victim:
    """A sequence of 40 tokens, a step that would write over it, and its next step, which must come out as ever."""

    def __init__(self, packed: PackedModel) -> None:
        self.vocab = packed.spec.vocab_size
        self.runs = Runs(packed, block_count=BLOCKS, threads=2)
        self.model, ids = self.runs.model, ids_of(1, 45)
        self.model.allocate_kv(BLOCKS, "int8")  # there is nothing in it that a step could read
        self.runs.feed({0: ids[:40], 1: [5]})
        self._next = self.runs.inputs({0: ids[40:]})
        self.expected = self.continued()
        # Tokens 35 to 39 of the first sequence anew, others than they are, and one more of the second.
        tables = self.runs.inputs({0: [1], 1: [2]})
        self.step: Step = {
            "token_ids": ints(9, 9, 9, 9, 9, 7),
            "positions": ints(35, 36, 37, 38, 39, 1),
            "query_starts": ints(0, 5, 6),
            "context_lengths": ints(40, 2),
            "block_tables": tables["block_tables"],
            "block_formats": np.zeros(tables["block_tables"].shape, np.uint8),
            "rows": ints(2, 5),
            "samplers": [None, sampler(self.vocab)],
            "output_positions": ints(0, 3),
            "drafts": ints(9, 9, 4),
            "draft_counts": ints(2, 1),
            "first_places": ints(0, 1),
            "layers": 0,
            "scored": [(0, ints(3, 4), 2)],
        }

    def continued(self) -> bytes:
        logits = self.model.logits(**self._next, rows=ints(*range(5)))
        return bytes(logits.tobytes())


@pytest.fixture(scope="module")
def victim(packed: PackedModel) -> Victim:
    return Victim(packed)


def element(name: str, at: int | tuple[int, int], value: int) -> Callable[[Step], None]:
    def change(step: Step) -> None:
        step[name] = step[name].copy()
        step[name][at] = value

    return change


def whole(name: str, value: Any) -> Callable[[Step], None]:
    """The argument itself, or what a function makes of it."""

    def change(step: Step) -> None:
        step[name] = value(step[name]) if callable(value) else value

    return change


ARRAYS = ("token_ids", "positions", "query_starts", "context_lengths", "block_tables")
DRAFTS = ("drafts", "draft_counts", "first_places")
BAD: dict[str, Callable[[Step], None]] = {
    **{f"token {token}": element("token_ids", 5, token) for token in (260, -1, MOST, LEAST)},
    **{f"position {at}": element("positions", 2, at) for at in (0, 36, 38, 200, -1, MOST, LEAST)},
    **{f"first position {at}": element("positions", 0, at) for at in (34, 36, -1, MOST, LEAST)},
    **{f"query starts at {at}": element("query_starts", 0, at) for at in (1, -1, MOST, LEAST)},
    **{f"queries cut at {at}": element("query_starts", 1, at) for at in (0, 6, 7, -1, MOST, LEAST)},
    **{f"queries end at {at}": element("query_starts", 2, at) for at in (5, 7, 0, -1, MOST, LEAST)},
    **{f"context {length}": element("context_lengths", 0, length) for length in (39, 41, 4, 0, 129, -1, MOST, LEAST)},
    **{f"other context {length}": element("context_lengths", 1, length) for length in (1, 0, MOST, LEAST)},
    **{f"block {block}": element("block_tables", (0, 1), block) for block in (-1, BLOCKS, MOST, LEAST)},
    **{f"other block {block}": element("block_tables", (1, 0), block) for block in (-1, BLOCKS, MOST, LEAST)},
    **{f"written block of format {number}": element("block_formats", (0, 1), number) for number in (1, 2, 3, 4, 255)},
    **{f"read block of format {number}": element("block_formats", (0, 0), number) for number in (1, 3, 4, 255)},
    **{f"row {row}": element("rows", 0, row) for row in (-1, 4, 6, MOST, MOST - 1, LEAST)},
    **{f"draft {token}": element("drafts", 1, token) for token in (-1, 260, MOST, LEAST)},
    **{f"{count} drafts": element("draft_counts", 0, count) for count in (-1, 1, 3, 4, MOST, LEAST)},
    **{f"first place {place}": element("first_places", 1, place) for place in (-1, 2, MOST, LEAST)},
    **{f"{count} layers": whole("layers", count) for count in (-1, 3, MOST, LEAST)},
    "65 drafts of a row": lambda step: step.update(drafts=ints(*[9] * 66), draft_counts=ints(65, 1)),
    "drafts without counts": whole("draft_counts", None),
    "drafts without first places": whole("first_places", None),
    **{f"output position {at}": element("output_positions", 1, at) for at in (-1, LEAST)},
    **{f"no {name}": whole(name, lambda array: array[:0]) for name in ARRAYS},
    **{f"{name} short": whole(name, lambda array: array[:-1]) for name in (*ARRAYS, "rows", "samplers", *DRAFTS)},
    **{f"{name} long": whole(name, lambda array: np.concatenate((array, array[-1:]))) for name in ARRAYS},
    **{f"{name} int64": whole(name, lambda array: array.astype(np.int64)) for name in (*ARRAYS, "rows")},
    **{f"{name} float32": whole(name, lambda array: array.astype(np.float32)) for name in (*ARRAYS, "rows")},
    **{f"{name} of bytes swapped": whole(name, lambda array: array.astype(">i4")) for name in ARRAYS},
    **{f"{name} with gaps": whole(name, lambda array: np.repeat(array, 2, -1)[..., ::2]) for name in ARRAYS},
    **{f"{name} with an axis more": whole(name, lambda array: array[None]) for name in ARRAYS},
    **{f"{name} None": whole(name, None) for name in (*ARRAYS, "rows", "samplers", "scored")},
    **{f"{name} a list": whole(name, lambda array: array.tolist()) for name in ARRAYS},
    "tables without columns": whole("block_tables", lambda array: array[:, :0].copy()),
    "a table too narrow": whole("block_tables", lambda array: array[:, :1].copy()),
    "formats of another shape": whole("block_formats", lambda array: array[:, :1].copy()),
    "formats of int32": whole("block_formats", lambda array: array.astype(np.int32)),
    "no output positions": whole("output_positions", ints()),
    "a sampler of another vocabulary": whole("samplers", lambda _: [None, sampler(261)]),
    "a number as sampler": whole("samplers", [None, 3]),
    "a rule as sampler": whole("samplers", [SamplingRule(), None]),
    **{f"scored from {row}": whole("scored", [(row, ints(3, 4), 2)]) for row in (-1, 5, 6, MOST, LEAST, 2**40)},
    **{f"scored target {token}": whole("scored", [(0, ints(3, token), 2)]) for token in (-1, 260, MOST, LEAST)},
    **{f"{count} alternatives": whole("scored", [(0, ints(3), count)]) for count in (-1, LEAST, 2**40)},
    "scored without targets": whole("scored", [(0, 2)]),
    "scored a list": whole("scored", [[0, ints(3), 2]]),
    "scored a number": whole("scored", [3]),
    "scored targets of int64": whole("scored", [(0, np.array([3]), 2)]),
    "scored targets of a list": whole("scored", [(0, [3], 2)]),
    "scored text": whole("scored", [("0", ints(3), 2)]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_step_is_refused_and_computes_nothing(victim: Victim, name: str) -> None:
    step = dict(victim.step)
    BAD[name](step)
    with pytest.raises(REFUSED) as error:
        victim.model.step(**step)
    assert str(error.value)
    if any(step[key] is not victim.step[key] for key in (*ARRAYS, "block_formats")):
        with pytest.raises(REFUSED):
            victim.model.logits(**{key: step[key] for key in (*ARRAYS, "block_formats", "rows")})
    assert victim.continued() == victim.expected


def throw_garbage(packed: PackedModel, seed: int, rounds: int) -> None:
    """Any numbers anywhere: steps are refused or computed, and the model answers a new sequence as ever."""
    random, victim = Random(seed), Victim(packed)
    values = [*range(-2, 10), 31, 32, 40, 64, 127, 128, 259, 260, MOST, LEAST, MOST - 31, LEAST + 1]
    names, refused = [*ARRAYS, *DRAFTS, "block_formats", "rows", "output_positions"], 0
    for _ in range(rounds):
        step = dict(victim.step)
        for name in random.choices(names, k=random.choice([1, 1, 2, 4])):
            array = step[name] = step[name].copy()
            value = random.choice(values)
            array.reshape(-1)[random.randrange(array.size)] = value % 256 if name == "block_formats" else value
        try:
            tokens, _, _ = victim.model.step(**step)
            assert ((tokens >= 0) & (tokens < victim.vocab)).all()
        except ValueError:
            refused += 1
    assert 0 < refused < rounds
    ids = ids_of(seed, 50)
    assert np.array_equal(victim.runs.feed({9: ids})[9], Runs(packed).feed({9: ids})[9])


@pytest.mark.parametrize("seed", range(2))
def test_garbage(packed: PackedModel, seed: int) -> None:
    throw_garbage(packed, seed, 1000)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10, 30))
def test_much_garbage(packed: PackedModel, seed: int) -> None:
    throw_garbage(packed, seed, 20000)


def test_the_step_that_they_are_made_of_is_good(packed: PackedModel) -> None:
    """And does write over the victim."""
    victim = Victim(packed)
    tokens, row_scores, prompt_scores = victim.model.step(**victim.step)
    assert ((tokens >= 0) & (tokens < victim.vocab)).all()
    assert row_scores == [None] * 4
    assert [len(part) for part in prompt_scores[0]] == [2, 2, 2, 2]
    assert victim.continued() != victim.expected


def test_more_alternatives_than_tokens_are_all_of_them(packed: PackedModel) -> None:
    victim = Victim(packed)
    step = victim.step | {"scored": [(0, ints(3), MOST)], "samplers": [None, sampler(victim.vocab, logprob_count=MOST)]}
    _, row_scores, prompt_scores = victim.model.step(**step)
    for scores in (row_scores[3], prompt_scores[0]):
        assert [sorted(ids) for ids in scores[2]] == [list(range(victim.vocab))]


@pytest.mark.parametrize("pairs", [[(0, BLOCKS)], [(-1, 0)], [(1, 2), (MOST, 0)], [(0, LEAST)]])
def test_copies_outside_the_pool_copy_nothing(victim: Victim, pairs: list[tuple[int, int]]) -> None:
    mine = victim.step["block_tables"][0, 1]
    spoiling = np.array([(victim.step["block_tables"][1, 0], mine), *pairs], np.int32)
    with pytest.raises(ValueError, match="pool"):
        victim.model.copy_blocks(spoiling)
    with pytest.raises(ValueError, match="pool"):
        victim.model.narrow_blocks(spoiling, "f32", "int8")
    assert victim.continued() == victim.expected


@pytest.mark.parametrize(
    "pairs", [np.zeros((2, 3), np.int32), np.zeros((2, 2), np.int64), np.zeros(2, np.int32), [(0, 1)]]
)
def test_pairs_of_another_kind(victim: Victim, pairs: Any) -> None:
    with pytest.raises(REFUSED):
        victim.model.copy_blocks(pairs)
    with pytest.raises(REFUSED):
        victim.model.narrow_blocks(pairs, "f32", "int8")


def test_pools(packed: PackedModel) -> None:
    model = packed.native(_native.ThreadPool(1), SETS[-1])
    step = {
        "token_ids": ints(1),
        "positions": ints(0),
        "query_starts": ints(0, 1),
        "context_lengths": ints(1),
        "block_tables": np.zeros((1, 1), np.int32),
        "rows": ints(0),
    }
    with pytest.raises(ValueError, match="pool"):
        model.logits(**step)  # before there is any pool
    for count in (0, -1, LEAST):
        with pytest.raises(ValueError, match="block_count"):
            model.allocate_kv(count, "f32")
    for name in ("", "fp8", "F32"):
        with pytest.raises(ValueError, match="unknown KV format"):
            model.allocate_kv(1, name)
        with pytest.raises(ValueError, match="unknown KV format"):
            model.kv_block_bytes(name)
    with pytest.raises(ValueError, match="int8 or int4"):
        model.narrow_blocks(np.zeros((1, 2), np.int32), "bf16", "bf16")
    with pytest.raises(ValueError, match="int8 or int4"):
        model.narrow_blocks(np.zeros((1, 2), np.int32), "int8", "int8")
    for name in ("f32", "int4"):  # neither hot nor int8
        with pytest.raises(ValueError, match="hot or int8"):
            model.narrow_blocks(np.zeros((1, 2), np.int32), name, "int4")
    model.allocate_kv(1, "f32")
    expected = model.logits(**step)
    with pytest.raises(ValueError, match="pool"):
        model.narrow_blocks(np.zeros((1, 2), np.int32), "f32", "int4")  # there is no such pool
    assert np.array_equal(model.logits(**step), expected)


def test_another_pool_begins_anew(packed: PackedModel) -> None:
    ids = ids_of(4, 50)
    expected = Runs(packed, kv_format="bf16").feed({0: ids})[0]
    runs = Runs(packed, kv_format="f32")
    assert not np.array_equal(runs.feed({0: ids})[0], expected)
    runs.model.allocate_kv(2, "bf16")
    inputs = runs.inputs({1: ids}) | {"block_tables": np.array([[1, 0]], np.int32)}
    assert np.array_equal(runs.model.logits(**inputs, rows=ints(*range(50))), expected)


def test_a_pool_that_memory_cannot_hold_changes_nothing(tmp_path: Path) -> None:
    """Blocks of 2.6 MB times 2^31: more than there are addresses."""
    wide = pack_model(
        make_rand_model(tmp_path / "wide", layers=20, heads=8, kv_heads=8, head_size=64, context_length=64)
    )
    runs = Runs(wide, block_count=2)
    expected = runs.feed({0: [1, 2, 3]})[0]
    with pytest.raises(MemoryError):
        runs.model.allocate_kv(MOST, "f32")
    with pytest.raises(MemoryError):
        runs.model.allocate_kv(MOST, "bf16")
    assert np.array_equal(runs.feed({1: [1, 2, 3]})[1], expected)
    inputs = runs.inputs({1: [4]})
    with pytest.raises(ValueError, match="pool"):
        runs.model.logits(**(inputs | {"block_tables": np.full_like(inputs["block_tables"], 7)}), rows=ints(0))


@pytest.mark.parametrize("threads", [0, -1, 1025, MOST, 2**40, 1.5, "2", None])
def test_thread_counts(threads: Any) -> None:
    with pytest.raises(REFUSED):
        _native.ThreadPool(threads)
