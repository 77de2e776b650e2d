"""The gated activation against float64, and its independence from neighbours and threads."""

import pytest
import torch

from kernels.silu_mul import silu_mul


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 63), (500, 96), (2, 40000)])
def test_matches_float64(rows: int, width: int) -> None:
    x = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(1)) * 4
    gate, up = x.double().split(width, dim=1)
    torch.testing.assert_close(silu_mul(x).double(), gate / (1 + torch.exp(-gate)) * up, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_keeps_its_bits_beside_others(threads: int) -> None:
    x = torch.randn(4, 2 * 1531, generator=torch.Generator().manual_seed(2))
    alone = silu_mul(x)
    many = x.repeat(100, 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(silu_mul(many), alone.repeat(100, 1))
    finally:
        torch.set_num_threads(before)


def test_refuses_an_odd_width() -> None:
    with pytest.raises(ValueError, match="silu_mul"):
        silu_mul(torch.zeros(2, 5))
