"""RMS norm against float64, with odd widths."""

import pytest
import torch

from kernels.rms_norm import rms_norm

BUDGET = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", BUDGET)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 63), (5, 576), (2, 1000)])
def test_matches_float64(rows: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows * width)
    x = (torch.randn(rows, width, generator=generator) * 3).to(dtype)
    weight = torch.randn(width, generator=generator).to(dtype)
    wide = x.double()
    expected = wide / torch.sqrt(wide.pow(2).sum(-1, keepdim=True) / width + 1e-5) * weight.double()
    found = rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=BUDGET[dtype], atol=BUDGET[dtype])


def test_a_row_keeps_its_bits_beside_others() -> None:
    x = torch.randn(40, 577, generator=torch.Generator().manual_seed(0))
    weight = torch.ones(577)
    together = rms_norm(x, weight, 1e-6)
    for row in (0, 7, 39):
        assert torch.equal(together[row : row + 1], rms_norm(x[row : row + 1], weight, 1e-6))


def test_refuses_a_weight_of_another_width() -> None:
    with pytest.raises(ValueError, match="rms_norm"):
        rms_norm(torch.zeros(2, 4), torch.ones(5), 1e-6)
