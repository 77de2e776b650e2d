"""Products with quantized matrices against float64 products of the numbers that they mean."""

from __future__ import annotations

import pytest
import torch

from kernels.activations import ActivationFormat, Quantized, quantize_plainly
from kernels.gpu.device import Gpu, gpu_of
from kernels.quant_matmul import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    multiply_fp8,
    multiply_int4,
    multiply_int8,
    multiply_plain,
    pack_int4,
    triton_impl,
)
from tests.kernels.triton.conftest import DEVICE

BUDGET = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of the largest output; with 16 bits, weights are rounded to them on the way."""
TYPES = list(BUDGET) if DEVICE.type == "cuda" else [torch.float32, torch.float16]
CAPABILITIES = [80, 90] if DEVICE.type == "cpu" or gpu_of(DEVICE).has_fp8 else [80]
SHAPES = [(1, 40, 96), (3, 70, 200), (17, 33, 520)]
"""Tokens, rows, columns."""


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, budget: float | None = None) -> None:
    assert found.dtype == dtype
    atol = (budget or BUDGET[dtype]) * float(expected.abs().max())
    torch.testing.assert_close(found.double().cpu(), expected, rtol=0, atol=atol)


def int4(rows: int, columns: int, group: int, has_offsets: bool, order: torch.Tensor | None = None) -> Int4Weight:
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=generator)
    groups = -(-columns // group)
    scales = torch.rand(rows, groups, generator=generator) + 0.1
    offsets = -scales * torch.randint(0, 16, scales.shape, generator=generator) if has_offsets else None
    return pack_int4(codes, scales, offsets, group, order)


def on(weight: Int4Weight, device: torch.device) -> Int4Weight:
    offsets, order = weight.offsets, weight.order
    return Int4Weight(
        weight.codes.to(device), weight.scales.to(device), None if offsets is None else offsets.to(device),
        weight.columns, weight.group_size, None if order is None else order.to(device),
    )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("group", "has_offsets"), [(32, True), (128, False), (1 << 20, True)])
@pytest.mark.parametrize("dtype", TYPES)
def test_int4(
    shape: tuple[int, int, int], group: int, has_offsets: bool, dtype: torch.dtype, device: torch.device
) -> None:
    tokens, rows, columns = shape
    x, bias = drawn(tokens, columns).to(dtype), drawn(rows, seed=1)
    weight = int4(rows, columns, group, has_offsets)
    expected = x.double() @ weight.dequantize().double().T + bias
    found = multiply_int4(x.to(device), on(weight, device), bias.to(device))
    assert_near(found, expected, dtype)


def test_int4_in_any_order_of_columns(device: torch.device) -> None:
    order = torch.randperm(96, generator=torch.Generator().manual_seed(3))
    weight = int4(20, 96, 32, True, order)
    x = drawn(2, 96)
    plain = int4(20, 96, 32, True)
    assert torch.equal(weight.dequantize()[:, order], plain.dequantize())
    assert_near(multiply_int4(x.to(device), on(weight, device)), x.double() @ weight.dequantize().double().T,
                torch.float32)  # fmt: skip


def quantized(x: torch.Tensor, format_: ActivationFormat, device: torch.device) -> tuple[Quantized, torch.Tensor]:
    codes, scales = quantize_plainly(x, format_.kind, format_.group)
    found = Quantized(codes, scales)
    return Quantized(codes.to(device), scales.to(device)), found.dequantize().double()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_is_exact_but_for_its_scales(shape: tuple[int, int, int], device: torch.device) -> None:
    tokens, rows, columns = shape
    x, _ = quantized(drawn(tokens, columns), ActivationFormat("int8"), device)
    codes, scales = quantize_plainly(drawn(rows, columns, seed=1), "int8")
    found = multiply_int8(x, Int8Weight(codes.to(device), scales.to(device)), torch.float32)
    sums = x.codes.cpu().double() @ codes.double().T
    expected = (sums.float() * scales[None]) * x.scales.cpu()[:, None]
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("block", [None, (128, 128), (16, 128), (7, 1 << 20)], ids=str)
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_fp8(block: tuple[int, int] | None, group: int, capability: int, device: torch.device) -> None:
    tokens, rows, columns = 5, 150, 300
    x, meant = quantized(drawn(tokens, columns), ActivationFormat("fp8", group), device)
    codes = drawn(rows, columns, seed=1).to(torch.float8_e4m3fn)
    scales = drawn(rows, seed=2) if block is None else drawn(-(-rows // block[0]), -(-columns // block[1]), seed=2)
    expected = meant @ Fp8Weight(codes, scales, block).dequantize().double().T
    weight = Fp8Weight(codes.to(device), scales.to(device), block)
    found = triton_impl.multiply(x, weight, torch.float32, None, None, Gpu("tested", capability, 2))
    # Hopper's instructions keep 13 bits of a sum's fraction.
    assert_near(found, expected, torch.float32, 3e-3 if device.type == "cuda" and capability == 90 else None)


def test_fixed_splits_do_not_depend_on_the_batch(device: torch.device) -> None:
    """On a GPU bit for bit; the interpreter multiplies by BLAS, which rounds by a row's place in its matrix."""
    x, weight = drawn(9, 520).to(device), drawn(40, 520, seed=1).to(device)
    whole = multiply_plain(x, weight, fixed_split=256)
    assert_near(whole, x.double().cpu() @ weight.double().cpu().T, torch.float32)
    for token in (0, 8):
        alone = multiply_plain(x[token : token + 1], weight, fixed_split=256)
        torch.testing.assert_close(alone[0], whole[token], rtol=0, atol=0 if device.type == "cuda" else 1e-4)
    # So many tiles that each adds up its splits itself; rows keep their places.
    wider = multiply_plain(x, torch.cat([weight] * 3), fixed_split=256)
    assert torch.equal(wider[:, :40], whole)
    packed = on(int4(40, 520, 64, False), device)
    whole = multiply_int4(x, packed, fixed_split=256)
    alone = multiply_int4(x[4:5], packed, fixed_split=256)
    torch.testing.assert_close(alone[0], whole[4], rtol=0, atol=0 if device.type == "cuda" else 1e-4)


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    x = drawn(2, 64).to(device)
    with pytest.raises(ValueError, match="of 96 columns"):
        multiply_int4(x, on(int4(8, 96, 32, False), device))
    with pytest.raises(ValueError, match="multiples of 32"):
        pack_int4(torch.zeros(2, 64, dtype=torch.uint8), torch.ones(2, 4), None, 16)
    with pytest.raises(ValueError, match="no multiples"):
        multiply_plain(x, x, fixed_split=100)
    codes = x.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="no multiple of 128"):
        multiply_fp8(Quantized(codes, x[:, 0].contiguous()), Fp8Weight(codes, x[:1, :2], (2, 32)), torch.float32)
    with pytest.raises(ValueError, match="multiply_int8"):
        multiply_int8(Quantized(codes, x[:, 0]), Int8Weight(codes, x[:, 0]), torch.float32)
