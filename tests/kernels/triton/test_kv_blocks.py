"""Whole blocks: copies in any order of dependence, bytes out and back, the bits of colder formats."""

from __future__ import annotations

import pytest
import torch

from kernels.kv_blocks import copy_blocks, demote_blocks, load_blocks, offload_blocks, pack_blocks, waves
from kernels.kv_write import NarrowBlocks
from services.executor.backends.torch_blocks import BlockBytes


def pool(dtype: torch.dtype, blocks: int = 6, size: int = 5, width: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(blocks)
    return torch.randn(2, 4, blocks, size, width, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_copies_as_if_in_order(dtype: torch.dtype, device: torch.device) -> None:
    found = pool(torch.float32).to(dtype).to(device)
    expected = found.clone()
    pairs = [(0, 1), (1, 2), (4, 3), (4, 0), (5, 4)]
    copy_blocks(found, pairs)
    for source, destination in pairs:
        expected[:, :, destination] = expected[:, :, source]
    assert torch.equal(found, expected)


def test_waves_have_no_order() -> None:
    assert waves([(0, 1), (0, 2), (3, 4), (1, 5), (6, 1), (7, 1)]) == [
        [(0, 1), (0, 2), (3, 4)],
        [(1, 5)],
        [(6, 1)],
        [(7, 1)],
    ]
    assert waves([]) == []


def narrow(format_: str, device: torch.device) -> NarrowBlocks:
    blocks = NarrowBlocks.zeros(format_, (2, 2, 6, 5, 12), torch.device("cpu"))
    for place in range(6):
        blocks.write(place, pool(torch.float32)[:, :, place])
    return NarrowBlocks(
        format_, blocks.numbers.to(device), blocks.key_ranges.to(device), blocks.value_ranges.to(device)
    )


@pytest.mark.parametrize("format_", ["hot", "int8", "fp8", "int4"])
def test_bytes_are_those_of_read_block_and_come_back(format_: str, device: torch.device) -> None:
    if format_ == "hot":
        tensors = [pool(torch.float16).to(device)]
    else:
        blocks = narrow(format_, device)
        tensors = [blocks.numbers, blocks.key_ranges, blocks.value_ranges]
    packed = pack_blocks(tensors, [4, 1])
    plain = BlockBytes(tensors)
    assert [bytes(row.numpy()) for row in packed.cpu()] == [bytes(plain.read(4)), bytes(plain.read(1))]
    host = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    offload_blocks(tensors, [4, 1], host)
    if device.type == "cuda":
        torch.cuda.synchronize()
    load_blocks(tensors, [0, 5], host)
    assert bytes(plain.read(0)) == bytes(plain.read(4))
    assert bytes(plain.read(5)) == bytes(plain.read(1))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("fp32", "int8"), ("fp16", "fp8"), ("fp32", "int4"), ("int8", "int4"), ("fp8", "int4"),
        pytest.param("int8", "fp8", marks=pytest.mark.full), pytest.param("fp8", "int8", marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_demotes_to_the_bits_of_the_plain_code(source: str, target: str, device: torch.device) -> None:
    hot = {"fp32": torch.float32, "fp16": torch.float16}.get(source)
    warm = pool(hot).to(device) if hot else narrow(source, device)
    if isinstance(warm, torch.Tensor):
        warm[0, 0, 3, :, 2] = 0  # a channel and a token of zeros
        warm[1, 3, 3, 1] = 0
        warm[1, 1, 3, :, 4] = 2.5
    found = NarrowBlocks.zeros(target, (2, 2, 4, 5, 12), device)
    found.numbers.fill_(77)
    expected = NarrowBlocks(target, found.numbers.clone(), found.key_ranges.clone(), found.value_ranges.clone())
    pairs = [(3, 1), (0, 2)] if source == "fp32" else [(3, 1)]
    demote_blocks(warm, found, pairs)
    for place, to in pairs:
        if isinstance(warm, torch.Tensor):
            expected.write(to, warm[:, :, place])
        else:
            expected.write(to, warm.read(torch.tensor([place], device=device)).squeeze(-3))
    assert torch.equal(found.key_ranges, expected.key_ranges)
    assert torch.equal(found.value_ranges, expected.value_ranges)
    assert torch.equal(found.numbers, expected.numbers)


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    hot = pool(torch.float32).to(device)
    with pytest.raises(ValueError, match="block 6 of a pool of 6"):
        copy_blocks(hot, [(0, 6)])
    with pytest.raises(ValueError, match="not 1 blocks"):
        load_blocks([hot], [0], torch.zeros(1, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="written twice"):
        demote_blocks(hot, narrow("int8", device), [(0, 1), (2, 1)])
    with pytest.raises(ValueError, match="demotion of blocks"):
        demote_blocks(hot[0], narrow("int8", device), [(0, 1)])
