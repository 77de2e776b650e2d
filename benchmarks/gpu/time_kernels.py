"""Kernels at an 8B model's sizes, against what the card can do and what others do on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.models import int4_matrix
from benchmarks.gpu.report import Row
from benchmarks.gpu.setting import Setting
from kernels.activations import ActivationFormat, quantize, quantize_plainly
from kernels.paged_attention import AttentionRule, MixedBatch, PagedKv, mixed_attention
from kernels.quant_matmul import Fp8Weight, Int8Weight, multiply_fp8, multiply_int4, multiply_int8
from kernels.rms_norm import add_rms_norm
from kernels.rope_kv_write import rope_kv_write
from kernels.silu_mul import gate_mul

HEADS, KV_HEADS, WIDTH, HIDDEN, INNER, BLOCK = 32, 8, 128, 4096, 14336, 16
DECODES = ((64, 4096), (4, 65536))
"""Sequences, context: more than a gigabyte."""
CHUNKS = ((4096, 4096), (2048, 8192))
"""Tokens, context: a whole prompt, and the end of one."""
LEAST = 0.95
"""Of the vendor's products in 16 bits: none of ours may be slower."""


def time_attention(setting: Setting, ceilings: Ceilings) -> Iterator[Row]:
    """Decodes over more than a gigabyte of KV, and chunks of a prompt beside flash attention over contiguous memory."""
    heads, kv_heads = (HEADS, KV_HEADS) if setting.scale == 1 else (4, 2)
    width = setting.sized(WIDTH, 16)
    for sequences, context in dict.fromkeys((setting.sized(s, 2), setting.sized(c, 32)) for s, c in DECODES):
        kv, batch = paged(setting, sequences, 1, context, kv_heads, width)
        queries = _drawn(setting, sequences, heads, width)
        rule = AttentionRule(width**-0.5)
        out = queries.new_zeros(sequences, heads * width)
        seconds = setting.clock.seconds(lambda: mixed_attention(queries, kv, batch, rule, out=out))  # noqa: B023
        rate = kv.hot.nbytes / seconds / ceilings.bytes_per_second
        yield Row(f"decode, {sequences} x {context}: bytes", kv.hot.nbytes / 1e9, "GB")
        yield Row(f"decode, {sequences} x {context}", rate, "of copy", 0.85)
    for tokens, context in dict.fromkeys((setting.sized(t, 16), setting.sized(c, 32)) for t, c in CHUNKS):
        kv, batch = paged(setting, 1, tokens, context, kv_heads, width)
        queries = _drawn(setting, tokens, heads, width)
        ours = setting.clock.seconds(lambda: mixed_attention(queries, kv, batch, rule))  # noqa: B023
        flash = setting.clock.seconds(_flash(setting, queries, kv_heads, context))
        yield Row(f"prefill of {tokens} in {context}, beside flash attention", flash / ours, "x", 1.0)


def _flash(setting: Setting, queries: Tensor, kv_heads: int, context: int) -> Callable[[], object]:
    """The same by PyTorch over contiguous keys and values, which have as many heads as queries [T, heads, D] have."""
    q = queries.transpose(0, 1)[None].contiguous()
    each = q.shape[1] // kv_heads
    k, v = (_drawn(setting, 1, kv_heads, context, q.shape[3]).repeat_interleave(each, 1) for _ in range(2))
    mask = causal_lower_right(q.shape[2], context)
    backend = SDPBackend.FLASH_ATTENTION if setting.place.type == "cuda" else SDPBackend.MATH

    def run() -> object:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return run


def time_fused(setting: Setting, ceilings: Ceilings) -> Iterator[Row]:
    """Bytes that have to be moved, over the time, beside copying."""
    rows, hidden, inner = setting.sized(8192, 4), setting.sized(HIDDEN, 64), setting.sized(INNER, 96)
    x, stream = _drawn(setting, rows, hidden), _drawn(setting, rows, hidden)
    weight = torch.ones(hidden, device=setting.place)
    yield _rate("norm and residual", setting, ceilings, 4 * x.nbytes, lambda: add_rms_norm(x, stream, weight, 1e-5))
    fp8 = ActivationFormat("fp8")
    moved = 3 * x.nbytes + x.numel()
    yield _rate("the same, to fp8", setting, ceilings, moved, lambda: add_rms_norm(x, stream, weight, 1e-5, fp8))
    gate_up = _drawn(setting, rows, 2 * inner)
    yield _rate("SwiGLU", setting, ceilings, gate_up.nbytes * 3 // 2, lambda: gate_mul(gate_up))
    heads, kv_heads, width = (HEADS, KV_HEADS, WIDTH) if setting.scale == 1 else (4, 2, 16)
    qkv = _drawn(setting, rows, heads + 2 * kv_heads, width)
    angles = torch.zeros(rows, width // 2, device=setting.place)
    places = torch.arange(rows, device=setting.place)
    blocks = -(-rows // BLOCK)
    for name, dtype in (("", setting.torch_dtype), (", to fp8", torch.float8_e4m3fn)):
        hot = torch.zeros(2 * kv_heads, blocks, BLOCK, width, dtype=torch.uint8, device=setting.place)
        hot = hot.view(dtype) if dtype.itemsize == 1 else hot.to(dtype)
        moved = qkv.nbytes + rows * width * (heads * qkv.element_size() + 2 * kv_heads * dtype.itemsize)
        yield _rate(
            f"RoPE and KV write{name}", setting, ceilings, moved,
            lambda hot=hot: rope_kv_write(qkv, angles, angles, places, places, hot),  # type: ignore[misc]
        )  # fmt: skip


def time_products(setting: Setting) -> Iterator[Row]:
    """Quantized products beside the vendor's in 16 bits, MLP shapes of an 8B model."""
    hidden, inner = setting.sized(HIDDEN, 64), setting.sized(INNER, 96)
    for name, rows, columns in (("gate and up", 2 * inner, hidden), ("down", hidden, inner)):
        weight = _drawn(setting, rows, columns)
        int4 = int4_matrix(weight).weight
        codes, scales = quantize_plainly(weight.float(), "int8")
        int8 = Int8Weight(codes, scales)
        codes, scales = quantize_plainly(weight.float(), "fp8")
        fp8 = Fp8Weight(codes, scales)
        for tokens, goal in {
            setting.sized(least): goal
            for least, goal in ((1, 2.8), (16, 2.8), (64, 1.5), (256, LEAST), (1024, LEAST), (4096, LEAST))
        }.items():
            x = _drawn(setting, tokens, columns)
            plain = setting.clock.seconds(lambda: F.linear(x, weight))  # noqa: B023
            ours = setting.clock.seconds(lambda: multiply_int4(x, int4))  # noqa: B023
            yield Row(f"W4A16, {name}, {tokens} tokens", plain / ours, "x 16 bits", goal)
        for tokens, goal in {
            setting.sized(least): goal for least, goal in ((16, LEAST), (1024, 1.6), (4096, 1.6))
        }.items():
            x = _drawn(setting, tokens, columns)
            plain = setting.clock.seconds(lambda: F.linear(x, weight))  # noqa: B023
            as_fp8, as_int8 = (quantize(x, ActivationFormat(kind)) for kind in ("fp8", "int8"))
            ours = setting.clock.seconds(lambda: multiply_fp8(as_fp8, fp8, setting.torch_dtype))  # noqa: B023
            yield Row(f"FP8, {name}, {tokens} tokens", plain / ours, "x 16 bits", goal)
            ours = setting.clock.seconds(lambda: multiply_int8(as_int8, int8, setting.torch_dtype))  # noqa: B023
            yield Row(f"W8A8, {name}, {tokens} tokens", plain / ours, "x 16 bits", LEAST)


def _rate(name: str, setting: Setting, ceilings: Ceilings, moved: int, run: object) -> Row:
    assert callable(run)
    return Row(name, moved / setting.clock.seconds(run) / ceilings.bytes_per_second, "of copy", 0.9)


def _drawn(setting: Setting, *shape: int) -> Tensor:
    return torch.randn(*shape, device=setting.place).to(setting.torch_dtype)


def paged(
    setting: Setting, sequences: int, queries: int, context: int, kv_heads: int, width: int
) -> tuple[PagedKv, MixedBatch]:
    """Blocks in random order, each sequence's context full."""
    each = -(-context // BLOCK)
    order = torch.randperm(sequences * each, device=setting.place).to(torch.int32)
    hot = torch.zeros(2 * kv_heads, sequences * each, BLOCK, width, dtype=setting.torch_dtype, device=setting.place)
    hot.normal_()
    batch = MixedBatch(
        torch.arange(sequences + 1, dtype=torch.int32, device=setting.place) * queries,
        torch.full((sequences,), context, dtype=torch.int32, device=setting.place),
        order.view(sequences, each), most_queries=queries, longest_context=context,
    )  # fmt: skip
    return PagedKv(hot), batch
