"""What Hugging Face's Llama calls the tensors: the inverse of `services.executor.models.hf: canonical_name`."""

from __future__ import annotations

from services.executor.models.hf import LAYER, TOP

_TOP = {canonical: stored.removesuffix(".weight") for stored, canonical in TOP.items()}
_LAYER = {part: module for module, part in LAYER.items()}


def module_name(name: str) -> str:
    """The module of a canonical name's tensor."""
    if name in _TOP:
        return _TOP[name]
    _, layer, part = name.split(".")
    return f"model.layers.{layer}.{_LAYER[part.removesuffix('_bias')]}"


def plain_name(name: str) -> str:
    """The name of a plain tensor."""
    return f"{module_name(name)}.{'bias' if name.endswith('_bias') else 'weight'}"
