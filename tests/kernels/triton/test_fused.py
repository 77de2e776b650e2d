"""Norm, gate and rotation, each with the rounding or writing that follows it; outputs are poisoned."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.activations import ActivationFormat, Quantized, quantize, quantize_plainly
from kernels.rms_norm import add_rms_norm
from kernels.rope_kv_write import rope_kv_write, rope_kv_write_plainly
from kernels.silu_mul import gate_mul

BUDGET = {torch.float32: 1e-5, torch.float16: 2e-3}
STEP = {"int8": 1 / 127, "fp8": 1 / 8}
"""The distance of codes: of the greatest number, and of each number itself."""
FORMATS = [None, ActivationFormat("int8"), ActivationFormat("fp8"), ActivationFormat("fp8", 128)]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(found: torch.Tensor | Quantized, expected: torch.Tensor, dtype: torch.dtype, kind: str | None) -> None:
    if isinstance(found, torch.Tensor):
        torch.testing.assert_close(found.double(), expected, rtol=BUDGET[dtype], atol=BUDGET[dtype])
        return
    assert kind is not None
    reach = expected.abs().amax(1, keepdim=True)
    allowed = STEP[kind] * (reach if kind == "int8" else expected.abs() + reach / 1024) * 0.51 + 1e-5
    assert bool(((found.dequantize().double() - expected).abs() <= allowed).all())


@pytest.mark.parametrize("format_", FORMATS[1:])
@pytest.mark.parametrize("columns", [1, 100, 300])
def test_quantize_equals_plain(columns: int, format_: ActivationFormat, device: torch.device) -> None:
    x = drawn(3, columns) * torch.tensor([[1e-3], [0.0], [1e4]])
    found = quantize(x.to(device), format_)
    codes, scales = quantize_plainly(x, format_.kind, format_.group)
    assert torch.equal(found.codes.cpu().view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found.scales.cpu(), scales)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("dtype", BUDGET)
def test_add_rms_norm(format_: ActivationFormat | None, dtype: torch.dtype, device: torch.device) -> None:
    x, residual = drawn(3, 100, dtype=dtype), drawn(3, 100, dtype=dtype, seed=1)
    weight = drawn(100, seed=2)
    stream = residual.clone().to(device)
    found = add_rms_norm(x.to(device), stream, weight.to(device), 1e-5, format_)
    assert torch.equal(stream.cpu(), x + residual)
    expected = F.rms_norm((x + residual).double(), (100,), weight.double(), 1e-5).to(device)
    assert_near(found, expected, dtype, format_.kind if format_ else None)
    if format_ is None:
        alone = add_rms_norm(x.to(device), None, weight.to(device), 1e-5)
        assert_near(alone, F.rms_norm(x.double(), (100,), weight.double(), 1e-5).to(device), dtype, None)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("format_", FORMATS)
def test_gate_mul(activation: str, format_: ActivationFormat | None, device: torch.device) -> None:
    gate_up = drawn(2, 2 * 2100, dtype=torch.float16) * 2
    gate, up = gate_up.double().chunk(2, 1)
    curve = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}[activation]
    expected = curve(gate) * up
    assert_near(gate_mul(gate_up.to(device), activation, format_), expected.to(device), torch.float16,
                format_.kind if format_ else None)  # fmt: skip


@pytest.mark.parametrize("turned", [60, 20])
@pytest.mark.parametrize("hot_dtype", [torch.float32, torch.float16, torch.float8_e4m3fn])
def test_rope_kv_write(turned: int, hot_dtype: torch.dtype, device: torch.device) -> None:
    heads, kv_heads, width, blocks, size = 17, 2, 60, 4, 5
    angles = torch.arange(40)[:, None] * (1 / 3.0) ** torch.arange(turned // 2)
    qkv = drawn(6, heads + 2 * kv_heads, width, dtype=torch.float16)
    positions, slots = torch.tensor([3, 0, 39, 7, 8, 9]), torch.tensor([7, 19, 0, -1, 12, 3])
    empty = torch.full((2 * kv_heads, blocks, size, width), float("nan")).to(hot_dtype)
    inputs = [angles.cos(), angles.sin(), positions, slots]
    found, found_hot = qkv.clone().to(device), empty.clone().to(device)
    rope_kv_write(found, *(part.to(device) for part in inputs), found_hot)
    expected, expected_hot = qkv.clone(), empty.clone()
    rope_kv_write_plainly(expected, *inputs, expected_hot)
    torch.testing.assert_close(found.cpu(), expected, rtol=2e-3, atol=1e-3)
    assert torch.equal(found[3].cpu(), qkv[3])
    assert torch.equal(found_hot.cpu().float().isnan(), expected_hot.float().isnan())
    budget = 0.07 if hot_dtype == torch.float8_e4m3fn else 1e-3  # a rounding may fall to the other side
    torch.testing.assert_close(
        found_hot.cpu().double().nan_to_num(), expected_hot.double().nan_to_num(), rtol=budget, atol=2e-3
    )


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    x = drawn(2, 8).to(device)
    with pytest.raises(ValueError, match="residual"):
        add_rms_norm(x, x[:1], x[0], 1e-5)
    with pytest.raises(ValueError, match="relu"):
        gate_mul(x, "relu")
    with pytest.raises(ValueError, match="no activations"):
        quantize(x, ActivationFormat("int4"))
    with pytest.raises(ValueError, match="rope_kv_write of"):
        rope_kv_write(x, x, x, x, x, x)
