"""A model whose weights lie on no quantization grid, made from one that was quantized: the reference of comparisons.

Weights that were stored in groups of 32 can be stored in such groups again without a loss, which proves nothing. Here
the channels of the residual stream, of each MLP and of each head's values are put in another order, the same in all
matrices that make or take them. The function stays; the weights of a group now come from many old groups.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.transformers_peer import dequantized_folder

WEIGHTS = "model.safetensors"
CHECKED_TOKENS = 256
LARGEST_LOGIT_ERROR = 1e-4
"""Of fp32 logits against those of the model as it was, relative: sums in another order."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def make_reference(source: str, out: Path) -> Path:
    """The model as a Hugging Face folder in bf16, off the grid. Kept where it is already there.

    ValueError where it does not compute what it should.
    """
    if (out / WEIGHTS).is_file():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        plain, made = dequantized_folder(source, Path(scratch, "plain"), torch.bfloat16), Path(scratch, out.name)
        shutil.copytree(plain, made, ignore=shutil.ignore_patterns(WEIGHTS))
        config = json.loads((plain / "config.json").read_text())
        (made / "config.json").write_text(json.dumps(_with_plain_rope(config), indent=2))
        save_file(permuted(config, load_file(plain / WEIGHTS)), made / WEIGHTS, metadata={"format": "pt"})
        check(plain, made)
        made.rename(out)
    return out


def permuted(config: Mapping[str, Any], tensors: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """The tensors of a Llama with its channels in another order; rows of q and k stay, whose pairs positions turn.

    All query heads that read a kv head share the order of its values.
    """
    draw = torch.Generator().manual_seed(seed)
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or hidden // heads
    residual = torch.randperm(hidden, generator=draw)
    orders = [
        (
            torch.randperm(wide, generator=draw),
            torch.stack([torch.randperm(size, generator=draw) for _ in range(kv_heads)]),
        )
        for _ in range(config["num_hidden_layers"])
    ]

    def reorder(name: str, tensor: Tensor) -> Tensor:
        match = _LAYER.fullmatch(name)
        if match is None:  # embedding and head [V, hidden], last norm [hidden]
            return tensor[..., residual]
        mlp, values = orders[int(match[1])]
        made = (torch.arange(kv_heads)[:, None] * size + values).reshape(-1)
        taken = torch.arange(heads)[:, None] * size + values.repeat_interleave(heads // kv_heads, 0)
        rows, columns = {
            "self_attn.q_proj": (None, residual),
            "self_attn.k_proj": (None, residual),
            "self_attn.v_proj": (made, residual),
            "self_attn.o_proj": (residual, taken.reshape(-1)),
            "mlp.gate_proj": (mlp, residual),
            "mlp.up_proj": (mlp, residual),
            "mlp.down_proj": (residual, mlp),
            "input_layernorm": (residual, None),
            "post_attention_layernorm": (residual, None),
        }[match[2].rpartition(".")[0]]
        found = tensor if rows is None else tensor[rows]
        return found if columns is None or tensor.ndim == 1 else found[:, columns]

    return {name: reorder(name, tensor).contiguous() for name, tensor in tensors.items()}


def check(plain: Path, made: Path) -> None:
    """ValueError where the logits of two folders differ by more than rounding, on random tokens."""
    from services.executor.eval.agreement import measure
    from services.executor.eval.options import Choice, load
    from services.executor.eval.text import Passage
    from services.executor.eval.windows import Frame

    frame = Frame(CHECKED_TOKENS, CHECKED_TOKENS)
    one, other = (load(Choice("--model", str(path), "torch", "fp32"), 0, frame.context) for path in (plain, made))
    ids = np.random.default_rng(0).integers(one.backend.spec.vocab_size, size=CHECKED_TOKENS).astype(np.int32)
    found = measure(one, other, [Passage((), ids, np.zeros_like(ids, np.int64))], frame, lambda count: None)
    print(
        f"{made}: {found.positions} positions, top-1 agreement {found.top1_agreement:.2%}, "
        f"largest relative error of logits {found.logit_error_max:.1e}",
        file=sys.stderr,
    )
    if found.logit_error_max > LARGEST_LOGIT_ERROR:
        raise ValueError(f"{made} does not compute what {plain} does: error {found.logit_error_max:.1e}")


def _with_plain_rope(config: dict[str, Any]) -> dict[str, Any]:
    """The base of positions at the top too, where readers of older configs look for it and else assume another."""
    rope = config.get("rope_parameters") or {}
    return config | ({"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {})
