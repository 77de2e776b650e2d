"""Attention over keys and values in int8 and int4, beside hot blocks of the same sequence.

The models have one layer, so that keys and values depend on no attention before and the reference can round them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from tests.fixtures.models import make_rand_model, reference_logits
from tests.native import budgets
from tests.native.packed_models import SETS, PackedModel, pack_model
from tests.native.runs import BLOCK, Logits, Runs, ids_of, relative_error

HEADS, KV_HEADS, HEAD_SIZE, PADDED = 6, 2, 40, 64
LAST = 20
"""Tokens that see the narrow blocks."""

Kinds = Callable[[int], str]
"""The format of a sequence's block by its place."""
THEN = " -> "
"""Between the formats of a block that was rewritten twice."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kv") / "model"
    sizes = {"layers": 1, "heads": HEADS, "kv_heads": KV_HEADS, "head_size": HEAD_SIZE}
    return make_rand_model(folder, 8, context_length=700, **sizes)


def change(path: Path, target: Path, factors: Mapping[str, NDArray[np.float32] | float]) -> Path:
    """The model with rows of projections multiplied, by the projection's letter."""
    tensors = load_file(path / "model.safetensors")
    for part, factor in factors.items():
        name = f"model.layers.0.self_attn.{part}_proj.weight"
        tensors[name] = (tensors[name] * factor).astype(np.float32)
    target.mkdir()
    (target / "config.json").write_bytes((path / "config.json").read_bytes())
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def native_logits(packed: PackedModel, instruction_set: str, hot: str, kinds: Kinds, count: int) -> Logits:
    """Logits of the last tokens of `count`, after the full blocks before them were rewritten."""
    runs, ids = Runs(packed, kv_format=hot, instruction_set=instruction_set), ids_of(2, count)
    runs.whole(0, ids[:-LAST], 128)
    for place in range((count - LAST) // BLOCK):
        for kind in kinds(place).split(THEN) if kinds(place) != hot else ():
            runs.narrow(0, [place], kind)
    return np.concatenate([runs.feed({0: ids[-LAST:-9]})[0], runs.whole(0, ids[-9:], 1)])


def expected_logits(path: Path, kinds: Kinds, count: int) -> NDArray[np.float64]:
    """The same by the reference; what is neither int8 nor int4 is exact."""

    def rounded(x: torch.Tensor, name: str) -> torch.Tensor:
        if not name.endswith((".keys", ".values")):
            return x
        x = x.clone()
        for place in range((count - LAST) // BLOCK):
            block = x[place * BLOCK : (place + 1) * BLOCK]
            # Keys have a range per channel, values one per token, which padding to whole panels takes part in.
            padded = torch.nn.functional.pad(block, (0, PADDED - HEAD_SIZE))
            padded = to_steps(padded, kinds(place), 0 if name.endswith(".keys") else 2)
            x[place * BLOCK : (place + 1) * BLOCK] = padded[..., :HEAD_SIZE]
        return x

    logits: NDArray[np.float64] = reference_logits(path, ids_of(2, count), rounded).numpy()[-LAST:]
    return logits


def to_steps(x: torch.Tensor, kind: str, dim: int) -> torch.Tensor:
    """x in 255 steps around 0 or in 16 steps between its ends, along `dim`; in both, one after the other."""
    for format_ in kind.split(THEN):
        if format_ not in ("int8", "int4"):
            continue
        low = to_bf16(x.amin(dim, keepdim=True), -1) if format_ == "int4" else torch.zeros((), dtype=x.dtype)
        steps = to_bf16((x - low).abs().amax(dim, keepdim=True) / (15 if format_ == "int4" else 127), 1)
        x = ((x - low) / steps.where(steps > 0, 1)).round() * steps + low
    return x


def to_bf16(x: torch.Tensor, direction: int) -> torch.Tensor:
    """The nearest bf16 that is not below x, or with -1 not above it; of x as fp32."""
    wanted = x.float() * direction
    found = wanted.bfloat16()
    bits = found.view(torch.int16)
    # Of bf16, the next one up is the next integer, or for negative ones the one before.
    higher = (bits + torch.where(found < 0, -1, 1).to(torch.int16)).view(torch.bfloat16)
    return torch.where(found.float() < wanted, higher, found).to(x.dtype) * direction


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("kind", ["int8", "int4", "int8 -> int4", "all and hot"])
@pytest.mark.parametrize("count", [150, 640])
def test_equals_the_reference_with_the_same_rounding(path: Path, instruction_set: str, kind: str, count: int) -> None:
    """`count` tokens: within one split of the context, and over three."""

    def kinds(place: int) -> str:
        return ("int8", "f32", "int4", "int8 -> int4")[place % 4] if kind == "all and hot" else kind

    found = native_logits(pack_model(path), instruction_set, "f32", kinds, count)
    budget = budgets.KV["rounded twice" if THEN in kinds(0) + kinds(3) else "rounded"]
    assert relative_error(found, expected_logits(path, kinds, count)) < budget


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("kind", ["f32", "bf16", "int8", "int4"])
def test_error_of_a_format(path: Path, instruction_set: str, kind: str) -> None:
    """Against exact keys and values; narrow blocks are made of bf16 ones."""
    found = native_logits(pack_model(path), instruction_set, "f32" if kind == "f32" else "bf16", lambda _: kind, 640)
    error = relative_error(found, expected_logits(path, lambda _: "f32", 640))
    assert budgets.KV[kind] / 50 < error < budgets.KV[kind]


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_keys_of_any_size_keep_their_precision(path: Path, instruction_set: str, kind: str, tmp_path: Path) -> None:
    """Case V2: rotary pairs of keys times 1,000 or 1 / 1,000, those of queries the other way round."""
    sizes = np.tile(np.resize(np.float32([1000, 1e-3, 1, 30, 0.2]), HEAD_SIZE // 2), 2)[:, None]
    factors = {"k": np.tile(sizes, (KV_HEADS, 1)), "q": np.tile(1 / sizes, (HEADS, 1))}
    folder = change(path, tmp_path / "scaled", factors)
    scaled = pack_model(folder)
    found = native_logits(scaled, instruction_set, "f32", lambda _: kind, 150)
    assert relative_error(found, expected_logits(folder, lambda _: kind, 150)) < budgets.KV["rounded"]
    found = native_logits(scaled, instruction_set, "bf16", lambda _: kind, 150)
    assert relative_error(found, expected_logits(path, lambda _: "f32", 150)) < budgets.KV[kind]


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_keys_and_values_of_zero(path: Path, instruction_set: str, kind: str, tmp_path: Path) -> None:
    """Ranges of no width."""
    silent = change(path, tmp_path / "silent", {"k": 0, "v": 0})
    found = native_logits(pack_model(silent), instruction_set, "f32", lambda _: kind, 150)
    assert relative_error(found, expected_logits(silent, lambda _: "f32", 150)) < budgets.LOGITS["f32"]


@pytest.mark.parametrize("instruction_set", SETS)
def test_same_bits_in_any_batch(path: Path, instruction_set: str) -> None:
    packed, ids = pack_model(path), ids_of(3, 610)
    found = []
    for threads, neighbours in ((1, 0), (3, 20)):
        runs = Runs(packed, kv_format="bf16", instruction_set=instruction_set, threads=threads, seed=threads)
        for i in range(1, neighbours + 1):
            runs.feed({i: ids_of(i, 40)})
            runs.narrow(i, [0], ("int8", "int4")[i % 2])
        runs.whole(0, ids[:600], 200)
        for place in range(18):
            if place % 3:
                runs.narrow(0, [place], ("int8", "int4")[place % 3 - 1])
        crowd = {i: [i] for i in range(1, neighbours + 1)}
        found.append(np.concatenate([runs.feed({**crowd, 0: ids[600:605]})[0], runs.whole(0, ids[605:], 1)]))
    assert np.array_equal(found[0], found[1])
