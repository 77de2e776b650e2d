"""Rotation by complex numbers, in float64."""

import pytest
import torch

from kernels.rope import rotate_


@pytest.mark.parametrize(("tokens", "heads", "width"), [(1, 1, 2), (7, 3, 6), (5, 4, 100), (9, 12, 64)])
def test_matches_complex_rotation(tokens: int, heads: int, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(tokens, heads, width, generator=generator)
    angles = torch.rand(tokens, 1, width // 2, generator=generator, dtype=torch.float64) * 6
    pairs = torch.complex(x[..., : width // 2].double(), x[..., width // 2 :].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    cos, sin = angles.cos().float(), angles.sin().float()
    found = rotate_(x, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    assert found is x  # in place
    torch.testing.assert_close(found.double(), torch.cat((turned.real, turned.imag), -1), rtol=1e-5, atol=1e-6)


def test_rotates_a_part_of_a_larger_tensor_only() -> None:
    x = torch.ones(2, 3, 4)
    rotate_(x[:, :2], torch.zeros(2, 1, 4), torch.full((2, 1, 4), 2.0))
    assert torch.equal(x[:, 2], torch.ones(2, 4))
    assert torch.equal(x[:, :2], torch.full((2, 2, 4), 2.0))


def test_refuses_angles_of_another_shape() -> None:
    with pytest.raises(ValueError, match="rotate_"):
        rotate_(torch.zeros(2, 3, 4), torch.zeros(2, 1, 2), torch.zeros(2, 1, 2))
