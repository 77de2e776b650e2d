"""What Hugging Face's Llama calls the tensors: the inverse of `services.executor.models.hf: canonical_name`."""

from __future__ import annotations

_TOP = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
_LAYER = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{part: f"self_attn.{part}_proj" for part in ("q", "k", "v", "o")},
    **{part: f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}


def module_name(name: str) -> str:
    """The module of a canonical name's tensor."""
    if name in _TOP:
        return _TOP[name]
    _, layer, part = name.split(".")
    return f"model.layers.{layer}.{_LAYER[part.removesuffix('_bias')]}"


def plain_name(name: str) -> str:
    """The name of a plain tensor."""
    return f"{module_name(name)}.{'bias' if name.endswith('_bias') else 'weight'}"
