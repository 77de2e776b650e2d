"""Writes land in their slots and nowhere else."""

import pytest
import torch

from kernels.kv_write import kv_write


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "blocks", "size", "width"), [(1, 3, 5, 7), (2, 9, 16, 60), (3, 4, 1, 2)])
def test_writes_only_the_named_slots(heads: int, blocks: int, size: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    cache = torch.full((2 * heads, blocks, size, width), float("nan"), dtype=dtype)
    slots = torch.randperm(blocks * size, generator=generator)[: blocks * size // 2]
    fresh = torch.randn(len(slots), 2 * heads, width, generator=generator)
    kv_write(cache, fresh, slots)
    for i, slot in enumerate(slots.tolist()):
        assert torch.equal(cache[:, slot // size, slot % size], fresh[i].to(dtype))
    assert int(cache.isnan().any(-1).sum()) == 2 * heads * (blocks * size - len(slots))


def test_refuses_another_number_of_heads() -> None:
    with pytest.raises(ValueError, match="kv_write"):
        kv_write(torch.zeros(4, 2, 2, 2), torch.zeros(1, 3, 2), torch.zeros(1, dtype=torch.int64))
