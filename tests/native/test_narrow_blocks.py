"""Blocks that native code makes narrower hold bit for bit what the reference makes of the same keys and values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kernels import _native
from kernels.kv_write import NarrowBlocks
from tests.fixtures.models import make_rand_model
from tests.native.packed_models import SETS, PackedModel, pack_model

LAYERS, HEADS, SIZE, TOKENS = 2, 2, 64, 32
HALF = SIZE // 2
BLOCKS = 3
Bytes = NDArray[np.uint8]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    sizes = {"layers": LAYERS, "heads": 4, "kv_heads": HEADS, "head_size": SIZE}
    return pack_model(make_rand_model(tmp_path_factory.mktemp("narrow") / "model", 1, **sizes))


def drawn(seed: int) -> torch.Tensor:
    """Keys and values [layers, 2 * heads, blocks, T, D] with channels of all sizes, offsets, zeros and equal ones."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(LAYERS, 2 * HEADS, BLOCKS, TOKENS, SIZE, generator=generator)
    x *= 10 ** torch.empty(SIZE).uniform_(-6, 4, generator=generator)
    x += torch.where(torch.arange(SIZE) % 5 == 0, 1e3, 0.0)
    x[..., 7] = 0
    x[..., 8] = 1 / 3
    x[:, :, 1, 3] = 0
    return x


def as_hot(x: torch.Tensor, kv_format: str) -> Bytes:
    """Blocks [blocks, bytes] as the native layout has them."""
    keys, values = x.transpose(0, 2).transpose(1, 2).chunk(2, 2)  # [blocks, layers, heads, T, D]
    keys = keys.transpose(-1, -2)  # [..., D, T]
    if kv_format == "bf16":
        keys = torch.stack(keys.chunk(2, -2), -1).bfloat16().view(torch.int16)  # [..., half, T, 2]
        values = values.unflatten(-2, (-1, 2)).transpose(-1, -2).bfloat16().view(torch.int16)  # [..., T / 2, D, 2]
    parts = [part.contiguous().numpy().view(np.uint8).reshape(BLOCKS, LAYERS, HEADS, -1) for part in (keys, values)]
    return np.concatenate(parts, -1).reshape(BLOCKS, -1)


def numbers_of(blocks: Bytes, kv_format: str) -> NarrowBlocks:
    """Native blocks [blocks, bytes] as the reference has them."""
    ranges = 1 if kv_format == "int8" else 2
    bytes_ = TOKENS * SIZE // ranges
    widths = [bytes_, 2 * ranges * SIZE, bytes_, 2 * ranges * TOKENS]
    parts = np.split(blocks.reshape(BLOCKS, LAYERS, HEADS, -1), np.cumsum(widths)[:-1], axis=-1)
    keys, key_ranges, values, value_ranges = (
        torch.from_numpy(np.ascontiguousarray(part)).movedim(0, 2) for part in parts
    )
    if kv_format == "int8":
        keys = keys.unflatten(-1, (SIZE // 4, TOKENS, 4)).transpose(-2, -3).flatten(-2).view(torch.int8)
        values = values.unflatten(-1, (TOKENS // 4, SIZE, 4)).transpose(-1, -2).flatten(-3, -2).view(torch.int8)
    else:
        keys = keys.unflatten(-1, (HALF, TOKENS)).transpose(-1, -2)  # channels i and i + half already share a byte
        pairs = values.unflatten(-1, (TOKENS // 2, SIZE))
        values = torch.stack((pairs & 15, pairs >> 4), -2).flatten(-3, -2)
        values = values[..., :HALF] | values[..., HALF:] << 4
    return NarrowBlocks(
        kv_format,
        torch.cat((keys, values), 1),
        key_ranges.contiguous().view(torch.bfloat16).unflatten(-1, (ranges, SIZE)),
        value_ranges.contiguous().view(torch.bfloat16).unflatten(-1, (ranges, TOKENS)).transpose(-1, -2),
    )


def expected(x: torch.Tensor, kv_format: str) -> NarrowBlocks:
    made = NarrowBlocks.zeros(kv_format, (LAYERS, HEADS, BLOCKS, TOKENS, SIZE), torch.device("cpu"))
    for block in range(BLOCKS):
        made.write(block, x[:, :, block])
    return made


def same(found: NarrowBlocks, wanted: NarrowBlocks) -> bool:
    pairs = (
        (found.numbers, wanted.numbers),
        (found.key_ranges.view(torch.int16), wanted.key_ranges.view(torch.int16)),
        (found.value_ranges.view(torch.int16), wanted.value_ranges.view(torch.int16)),
    )
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("hot", ["f32", "bf16"])
def test_equal_the_reference(packed: PackedModel, instruction_set: str, threads: int, hot: str) -> None:
    model = packed.native(_native.ThreadPool(threads), instruction_set)
    for kv_format in (hot, "int8", "int4"):
        model.allocate_kv(BLOCKS, kv_format)
    x = drawn(threads)
    if hot == "bf16":
        x = x.bfloat16().float()
    model.kv_blocks(hot)[:] = as_hot(x, hot)
    order = np.array([[2, 0], [0, 1], [1, 2]], np.int32)  # source, target
    whole = np.array([[0, 0], [1, 1], [2, 2]], np.int32)
    moved = x[:, :, order[:, 0].tolist()]
    model.narrow_blocks(order, hot, "int8")
    warm = numbers_of(model.kv_blocks("int8"), "int8")
    assert same(warm, expected(moved, "int8"))
    model.narrow_blocks(whole, "int8", "int4")
    widened = expected(moved, "int8").read(torch.arange(BLOCKS))
    assert same(numbers_of(model.kv_blocks("int4"), "int4"), expected(widened, "int4"))
    model.narrow_blocks(order, hot, "int4")
    assert same(numbers_of(model.kv_blocks("int4"), "int4"), expected(moved, "int4"))


def test_ranges_span_what_they_hold() -> None:
    """No number lies more than half a step off, however far from zero its channel is."""
    x = drawn(7)
    for kv_format in ("int8", "int4"):
        found = expected(x, kv_format).read(torch.arange(BLOCKS))
        keys, wanted = found[:, :HEADS].double(), x[:, :HEADS].double()
        if kv_format == "int8":
            steps = wanted.abs().amax(-2, keepdim=True) / 127
        else:
            low = wanted.amin(-2, keepdim=True)
            steps = (wanted.amax(-2, keepdim=True) - low + low.abs() / 128) / 15  # a minimum has eight bits
        assert bool(((keys - wanted).abs() <= steps * (0.5 * (1 + 1 / 64)) + wanted.abs() * 1e-6).all())
