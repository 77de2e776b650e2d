"""A residual added, the sum normalized, the result rounded to 8 bits where asked: one pass over a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activations import ActivationFormat, Quantized
from kernels.activations.triton_impl import bits, codes_of, inverse_scale, scale_of, store_grouped
from kernels.gpu.device import gpu_of


@triton.jit
def add_rms_norm_kernel(
    out, scales, x, residual, weight, epsilon, stride_x, columns,
    HAS_RESIDUAL: tl.constexpr, KIND: tl.constexpr, GROUPED: tl.constexpr, HAS_FP8: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    mask = d < columns
    values = tl.load(x + row * stride_x + d, mask=mask, other=0).to(tl.float32)
    if HAS_RESIDUAL:
        at = residual + row * columns + d
        total = (values + tl.load(at, mask=mask, other=0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(at, total, mask=mask)
        values = total.to(tl.float32)  # as later layers read it
    mean = tl.sum(values * values, 0) / columns
    normed = values * tl.rsqrt(mean + epsilon) * tl.load(weight + d, mask=mask, other=0).to(tl.float32)
    if KIND == "":
        tl.store(out + row * columns + d, normed.to(out.dtype.element_ty), mask=mask)
    elif GROUPED:
        store_grouped(out, scales, normed, row, 0, columns, KIND == "int8", HAS_FP8, WIDTH)
    else:
        reach = tl.max(tl.abs(normed), 0)
        tl.store(scales + row, scale_of(reach, KIND == "int8"))
        codes = codes_of(normed * inverse_scale(reach, KIND == "int8"), KIND == "int8", HAS_FP8)
        tl.store(out + row * columns + d, codes, mask=mask)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    epsilon: float,
    out: Tensor | Quantized,
    format_: ActivationFormat | None,
) -> None:
    """As kernels.rms_norm.add_rms_norm, which has checked the arguments."""
    rows, columns = x.shape
    if not rows:
        return
    width = max(128, triton.next_power_of_2(columns))
    stored, scales = (out, x) if isinstance(out, torch.Tensor) else (bits(out.codes), out.scales)
    add_rms_norm_kernel[(rows,)](
        stored, scales, x, x if residual is None else residual, weight, epsilon, x.stride(0), columns,
        HAS_RESIDUAL=residual is not None, KIND=format_.kind if format_ else "",
        GROUPED=format_ is not None and format_.group > 0, HAS_FP8=gpu_of(x.device).has_fp8, WIDTH=width,
        num_warps=min(16, max(1, width // 512)),
    )  # fmt: skip
