"""Every kernel against float64: odd shapes, and outputs poisoned before they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.models import int4_matrix
from benchmarks.gpu.report import Row
from benchmarks.gpu.setting import Setting
from kernels.activations import ActivationFormat, Quantized, quantize, quantize_plainly
from kernels.kv_blocks import copy_blocks, demote_blocks, pack_blocks, unpack_blocks
from kernels.kv_write import NarrowBlocks
from kernels.next_step import DecodeState, feed_back, feed_back_plainly
from kernels.paged_attention import AttentionRule, mixed_attention
from kernels.paged_attention.plain import mixed_attention as plain_attention
from kernels.quant_matmul import Fp8Weight, Int8Weight, multiply_fp8, multiply_int4, multiply_int8, multiply_plain
from kernels.rms_norm import add_rms_norm
from kernels.rope_kv_write import rope_kv_write, rope_kv_write_plainly
from kernels.silu_mul import gate_mul
from tests.kernels.triton.cases import Case

BUDGET = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of the largest output."""
FP8_BUDGET = 3e-3
"""The same where e4m3 is multiplied: Hopper's instructions keep 13 bits of a sum's fraction."""
STEP = {"int8": 0.01, "fp8": 0.08}
"""Of the largest output where outputs are rounded to 8 bits: a step of their format."""


@dataclass(frozen=True, slots=True)
class Check:
    """An error, and what it may be at most."""

    name: str
    run: Callable[[torch.dtype], tuple[float, float]]
    by_type: bool = True  # else run once, with the first type


def verify(setting: Setting) -> Iterator[Row]:
    """A row for each kernel and type: the error over its budget."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # what is allocated then holds NaN
    try:
        for check in _checks(setting):
            for dtype in setting.dtypes if check.by_type else setting.dtypes[:1]:
                error, budget = check.run(dtype)
                name = f"{check.name}, {str(dtype).removeprefix('torch.')}" if check.by_type else check.name
                yield Row(name, error / budget if budget else error, "of budget", 1.0 if budget else 0.0, "at most")
    finally:
        torch.use_deterministic_algorithms(False)


def _checks(setting: Setting) -> list[Check]:
    place = setting.place
    attention = {
        "attention, chunks and decodes": Case([(5, 70), (1, 33), (17, 100)], heads=6, kv_heads=2, width=20),
        "attention, 128 wide over 7 queries a head": Case([(1, 300), (3, 66)], heads=14, kv_heads=2, width=128),
        "attention, odd sizes": Case([(1, 90), (3, 66)], heads=9, kv_heads=3, width=100, block_size=7),
        "attention, fp8 and int4 blocks": Case([(1, 97), (4, 66)], width=24, ages=("fp8", "int4")),
        "attention, int8 and int4 blocks": Case([(1, 97), (4, 66)], width=64, ages=("int8", "int4")),
        "attention over e4m3": Case([(1, 300), (3, 66)], width=64, hot_dtype=torch.float8_e4m3fn),
    }
    odd = AttentionRule(0.3, window=37, soft_cap=5.0, sinks=_drawn(4).to(place))
    checks = [Check(name, _attention(case, place)) for name, case in attention.items()]
    checks += [
        Check("attention, fixed splits", _attention(Case([(24, 110), (1, 80)]), place, 64)),
        Check("attention, window, cap and sinks", _attention(Case([(24, 110), (1, 80), (1, 20)]), place, rule=odd)),
        Check("W4A16", lambda dtype: _int4(dtype, place)),
        Check("plain products, fixed splits", lambda dtype: _plain(dtype, place)),
        Check("W8A8", lambda dtype: _int8(dtype, place), by_type=False),
        Check("FP8, a scale a row", lambda dtype: _fp8(None, place), by_type=False),
        Check("FP8, blocks of 128", lambda dtype: _fp8((128, 128), place), by_type=False),
        Check("norm and residual", lambda dtype: _norm(dtype, place)),
        Check("SwiGLU", lambda dtype: _gate(dtype, place)),
        *(
            Check(f"{name}, to {kind}", lambda dtype, run=run, kind=kind: run(dtype, place, ActivationFormat(kind)))
            for name, run in (("norm and residual", _norm), ("SwiGLU", _gate))
            for kind in STEP
        ),
        Check("RoPE and KV write", lambda dtype: _rope(dtype, place)),
        Check("activations in int8 and fp8", lambda dtype: _activations(place), by_type=False),
        Check("demotion", lambda dtype: _demotion(place), by_type=False),
        Check("blocks packed and back", lambda dtype: _packing(dtype, place)),
        Check("blocks copied", lambda dtype: _copying(dtype, place)),
        Check("tokens fed back", lambda dtype: _feed_back(place), by_type=False),
    ]
    return checks


def _drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _error(found: Tensor, expected: Tensor, budget: float) -> tuple[float, float]:
    """The greatest error, and what it may be. NaN counts as boundless."""
    expected = expected.double().cpu()
    error = (found.double().cpu() - expected).abs().nan_to_num(nan=torch.inf).max()
    return float(error), budget * max(1.0, float(expected.abs().max()))


def _attention(
    case: Case, place: torch.device, split: int | None = None, rule: AttentionRule | None = None
) -> Callable[[torch.dtype], tuple[float, float]]:
    def run(dtype: torch.dtype) -> tuple[float, float]:
        case.dtype = dtype
        queries, kv, batch = case.build(place)
        out = queries.new_full((len(queries), case.heads * case.width), float("nan"))
        found = mixed_attention(queries, kv, batch, rule or case.rule, fixed_split=split, out=out)
        return _error(found, plain_attention(queries, kv, batch, rule or case.rule), BUDGET[dtype])

    return run


def _int4(dtype: torch.dtype, place: torch.device) -> tuple[float, float]:
    worst = (0.0, 1.0)
    for tokens, rows, columns in ((1, 40, 96), (3, 70, 256), (17, 33, 512)):
        x, matrix = (
            _drawn(tokens, columns).to(place, dtype),
            int4_matrix(_drawn(rows, columns, seed=1).to(place, dtype)),
        )
        expected = x.double() @ matrix.weight.dequantize().double().T
        error = _error(multiply_int4(x, matrix.weight), expected, BUDGET[dtype])
        worst = max(worst, error, key=lambda one: one[0] / one[1])
    return worst


def _plain(dtype: torch.dtype, place: torch.device) -> tuple[float, float]:
    x, weight = _drawn(9, 520).to(place, dtype), _drawn(70, 520, seed=1).to(place, dtype)
    return _error(multiply_plain(x, weight, fixed_split=256), x.double() @ weight.double().T, BUDGET[dtype])


def _int8(dtype: torch.dtype, place: torch.device) -> tuple[float, float]:
    x = quantize(_drawn(5, 200).to(place, dtype), ActivationFormat("int8"))
    codes, scales = quantize_plainly(_drawn(70, 200, seed=1), "int8")
    weight = Int8Weight(codes.to(place), scales.to(place))
    expected = x.dequantize().double() @ weight.dequantize().double().T
    return _error(multiply_int8(x, weight, torch.float32), expected, BUDGET[torch.float32])


def _fp8(block: tuple[int, int] | None, place: torch.device) -> tuple[float, float]:
    x = quantize(_drawn(5, 300).to(place), ActivationFormat("fp8", 0 if block is None else 128))
    codes = _drawn(150, 300, seed=1).to(torch.float8_e4m3fn).to(place)
    scales = (_drawn(150, seed=2) if block is None else _drawn(2, 3, seed=2)).to(place)
    weight = Fp8Weight(codes, scales, block)
    expected = x.dequantize().double() @ weight.dequantize().double().T
    return _error(multiply_fp8(x, weight, torch.float32), expected, FP8_BUDGET)


def _norm(dtype: torch.dtype, place: torch.device, format_: ActivationFormat | None = None) -> tuple[float, float]:
    x, stream, weight = _drawn(3, 100).to(place, dtype), _drawn(3, 100, seed=1).to(place, dtype), _drawn(100).to(place)
    expected = F.rms_norm((x + stream).double(), (100,), weight.double(), 1e-5)
    return _rounded_error(add_rms_norm(x, stream, weight, 1e-5, format_), expected, dtype, format_)


def _gate(dtype: torch.dtype, place: torch.device, format_: ActivationFormat | None = None) -> tuple[float, float]:
    gate_up = _drawn(2, 2 * 2100).to(place, dtype)
    gate, up = gate_up.double().chunk(2, 1)
    return _rounded_error(gate_mul(gate_up, "silu", format_), F.silu(gate) * up, dtype, format_)


def _rounded_error(
    found: Tensor | Quantized, expected: Tensor, dtype: torch.dtype, format_: ActivationFormat | None
) -> tuple[float, float]:
    numbers = found if isinstance(found, torch.Tensor) else found.dequantize()
    return _error(numbers, expected, BUDGET[dtype] + (STEP[format_.kind] if format_ else 0.0))


def _rope(dtype: torch.dtype, place: torch.device) -> tuple[float, float]:
    heads, kv_heads, width = 5, 2, 60
    angles = torch.arange(40)[:, None] * (1 / 3.0) ** torch.arange(width // 2)
    inputs = [
        part.to(place) for part in (angles.cos(), angles.sin(), torch.tensor([3, 0, 39]), torch.tensor([7, -1, 0]))
    ]
    qkv = _drawn(3, heads + 2 * kv_heads, width).to(place, dtype)
    pools = [torch.zeros(2 * kv_heads, 4, 5, width, dtype=dtype, device=place) for _ in range(2)]
    found, expected = qkv.clone(), qkv.clone()
    rope_kv_write(found, *inputs, pools[0])
    rope_kv_write_plainly(expected, *inputs, pools[1])
    rows = [
        torch.cat((part[:, :heads].flatten(), pool.flatten()))
        for part, pool in ((found, pools[0]), (expected, pools[1]))
    ]
    return _error(rows[0], rows[1], BUDGET[dtype])


def _activations(place: torch.device) -> tuple[float, float]:
    """Bit for bit: the error is how many codes differ."""
    wrong = 0
    x = _drawn(3, 300) * torch.tensor([[1e-3], [0.0], [1e4]])
    for format_ in (ActivationFormat("int8"), ActivationFormat("fp8"), ActivationFormat("fp8", 128)):
        found: Quantized = quantize(x.to(place), format_)
        codes, scales = quantize_plainly(x, format_.kind, format_.group)
        wrong += int((found.codes.cpu().view(torch.uint8) != codes.view(torch.uint8)).sum())
        wrong += int((found.scales.cpu() != scales).sum())
    return float(wrong), 0.0


def _demotion(place: torch.device) -> tuple[float, float]:
    """Bit for bit."""
    wrong, shape = 0, (2, 2, 3, 16, 20)
    hot = _drawn(2, 4, 3, 16, 20)
    for format_ in ("int8", "fp8", "int4"):
        found, expected = (NarrowBlocks.zeros(format_, shape, torch.device(on)) for on in (place, "cpu"))
        demote_blocks(hot.to(place), found, [(0, 2), (2, 1)])
        for source, target in ((0, 2), (2, 1)):
            expected.write(target, hot[:, :, source])
        for name in ("numbers", "key_ranges", "value_ranges"):
            ours, theirs = getattr(found, name).cpu().view(torch.uint8), getattr(expected, name).view(torch.uint8)
            wrong += int((ours != theirs).sum())
    return float(wrong), 0.0


def _packing(dtype: torch.dtype, place: torch.device) -> tuple[float, float]:
    """Bit for bit."""
    pool = _drawn(2, 4, 3, 16, 20).to(place, dtype)
    other = torch.zeros_like(pool)
    unpack_blocks([other], [0, 2], pack_blocks([pool], [2, 1]))
    wrong = (
        (other[:, :, 0] != pool[:, :, 2]).sum() + (other[:, :, 2] != pool[:, :, 1]).sum() + (other[:, :, 1] != 0).sum()
    )
    return float(wrong), 0.0


def _copying(dtype: torch.dtype, place: torch.device) -> tuple[float, float]:
    """Bit for bit; the second copy reads what the first one wrote."""
    pool = _drawn(2, 4, 5, 16, 20).to(place, dtype)
    expected = pool.clone()
    copy_blocks(pool, [(0, 3), (3, 1), (4, 0)])
    for source, target in ((0, 3), (3, 1), (4, 0)):
        expected[:, :, target] = expected[:, :, source]
    return float((pool != expected).sum()), 0.0


def _feed_back(place: torch.device) -> tuple[float, float]:
    """Bit for bit."""
    drawn = torch.tensor([5, -1, 7], dtype=torch.int32)
    states = []
    for on in (place, torch.device("cpu")):
        whole, narrow = torch.tensor([3, 15, 16], device=on), torch.tensor([4, 16, 17], dtype=torch.int32, device=on)
        tables = torch.arange(9, dtype=torch.int32, device=on).view(3, 3)
        states.append(DecodeState(whole.clone(), whole.clone(), whole.clone(), narrow.clone(), narrow.clone(), tables))
    feed_back(states[0], drawn.to(place), 3, 16)
    feed_back_plainly(states[1], drawn, 3, 16)
    names = ("tokens", "positions", "slots", "contexts", "draws")
    return float(sum(int((getattr(states[0], name).cpu() != getattr(states[1], name)).sum()) for name in names)), 0.0
