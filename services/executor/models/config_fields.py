"""The sizes in a config.json of any architecture, under the names that model families give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.executor.kv_bytes import KvDims
from services.executor.models.fields import MOST_NUMBER
from services.executor.models.hf import ARCHITECTURES
from services.executor.models.parameters import Layers
from services.executor.models.weights import load_failed

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
HEAD_SIZE = ("head_dim", "kv_channels")
HIDDEN = ("hidden_size", "n_embd", "d_model")
INNER = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner")
VOCABULARY = ("vocab_size", "padded_vocab_size")
CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")

_TWO_MATRICES = ("gpt", "bloom", "codegen", "falcon", "mpt", "opt", "phi", "starcoder2")
"""Model types whose MLP has no gate begin so; phi3 has one."""
_TIED = ("gemma", "gpt2", "gpt_bigcode", "bloom", "opt", "mpt", "falcon", "cohere")
"""Model types that share the embedding with the head where the config does not mention it."""
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, slots=True)
class ConfigSizes:
    """What a config.json says. `notes` are for people: what was assumed, and what the sizes leave out."""

    architecture: str
    kv: KvDims
    head_count: int
    context_length: int | None
    layers: Layers
    dtype: str | None  # that the weights are stored in, a key of GROUPED_BYTES; None where it is none of these
    is_supported: bool  # whether a backend computes it, and so whether weights are counted exactly
    notes: tuple[str, ...]


def read_sizes(config: Mapping[str, Any]) -> ConfigSizes:
    """The sizes. Raises MODEL_LOAD_FAILED, naming the field, where one that keys and values depend on is missing."""
    top, config = config, _language_part(config)
    if config.get("is_encoder_decoder"):
        raise load_failed("config.json: is_encoder_decoder: only decoders keep KV of what they generate")
    architecture = _architecture(top, config)
    is_known = architecture in ARCHITECTURES
    notes = [] if is_known else [f"no backend computes {architecture}"]
    heads, hidden = _needed(config, HEADS), _needed(config, HIDDEN)
    head_size = _optional(config, HEAD_SIZE) or hidden // heads
    if not head_size:
        raise load_failed(f"config.json: head_dim is missing, and {HIDDEN[0]} {hidden} holds no {heads} heads")
    layer_count = _needed(config, LAYERS)
    kv = KvDims(_layers_with_kv(config, layer_count, notes), _kv_heads(config, heads, notes), head_size, head_size)
    if rank := _count(config, "kv_lora_rank"):
        kv = KvDims(layer_count, 1, rank + _count(config, "qk_rope_head_dim"), 0)
        notes.append("latent attention: one compressed vector a token and layer instead of keys and values")
    window = _count(config, "sliding_window") if config.get("use_sliding_window", True) else None
    if window:
        notes.append(f"sliding_window {window}: counted as if all layers kept the whole context")
    return ConfigSizes(
        architecture=architecture,
        kv=kv,
        head_count=heads,
        context_length=_optional(config, CONTEXT),
        layers=_layers(config, kv, layer_count, heads * head_size, hidden),
        dtype=_dtype(top, config, notes),
        is_supported=is_known,
        notes=tuple(notes),
    )


def _architecture(top: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    names = top.get("architectures")
    return str(names[0] if isinstance(names, list) and names else config.get("model_type", "unknown"))


def _language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a model that also sees or hears, the part that generates text."""
    part = config.get("text_config")
    return part if isinstance(part, dict) and not any(name in config for name in LAYERS) else config


def _layers_with_kv(config: Mapping[str, Any], layer_count: int, notes: list[str]) -> int:
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layer_count:
        return layer_count
    count = sum(kind.endswith("attention") and kind != "linear_attention" for kind in map(str, kinds))
    if not count:
        raise load_failed("config.json: layer_types names no layer with attention")
    if count < layer_count:
        notes.append(f"{count} of {layer_count} layers keep KV; the state of the others is not counted")
    return count


def _kv_heads(config: Mapping[str, Any], heads: int, notes: list[str]) -> int:
    if config.get("multi_query") and not (
        config.get("new_decoder_architecture") or config.get("multi_query_group_num")
    ):
        return 1
    kv_heads = _optional(config, KV_HEADS)
    if kv_heads is None:
        notes.append(f"{KV_HEADS[0]} is not stated: as many as there are heads, {heads}")
        return heads
    if heads % kv_heads:
        raise load_failed(f"config.json: {heads} heads cannot share {kv_heads} key and value heads")
    return kv_heads


def _layers(config: Mapping[str, Any], kv: KvDims, layer_count: int, query_size: int, hidden: int) -> Layers:
    kind = str(config.get("model_type", ""))
    kv_size = kv.kv_head_count * kv.key_size
    inner = _optional(config, INNER) or 4 * hidden
    experts = _optional(config, EXPERTS, least=0) or 0
    expert_size = _optional(config, ("moe_intermediate_size",)) or inner
    shared = _count(config, "n_shared_experts") * expert_size
    has_bias = bool(config.get("attention_bias", False))
    return Layers(
        layer_count=layer_count,
        hidden_size=hidden,
        query_size=query_size,
        key_size=kv_size,
        value_size=kv.kv_head_count * kv.value_size,
        intermediate_size=inner,
        vocab_size=_needed(config, VOCABULARY),
        tied_embeddings=bool(config.get("tie_word_embeddings", kind.startswith(_TIED))),
        attention_bias=has_bias or kind == "qwen2",
        output_bias=has_bias and kind != "qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)),
        gated=not kind.startswith(_TWO_MATRICES) or kind.startswith(("gpt_oss", "phi3", "phimoe")),
        expert_count=experts,
        expert_size=expert_size,
        shared_size=_count(config, "shared_expert_intermediate_size") or shared,
        dense_layer_count=_count(config, "first_k_dense_replace"),
    )


def _dtype(top: Mapping[str, Any], config: Mapping[str, Any], notes: list[str]) -> str | None:
    quantization = top.get("quantization_config") or config.get("quantization_config")
    if quantization:
        dtype = _quantized_dtype(quantization)
        if dtype is not None:
            notes.append(f"quantized checkpoint: its weights are counted as {dtype}")
        return dtype
    stated = next((part[name] for part in (config, top) for name in ("dtype", "torch_dtype") if part.get(name)), None)
    if stated is None:
        notes.append("torch_dtype is not stated: weights are counted as bf16")
        return "bf16"
    return _DTYPES.get(str(stated).removeprefix("torch."))


def _quantized_dtype(quantization: Any) -> str | None:
    if not isinstance(quantization, dict):
        return None
    bits: Any = quantization.get("bits") or quantization.get("w_bit") or _group_bits(quantization)
    bits = bits or {"fp8": 8, "fbgemm_fp8": 8, "mxfp4": 4}.get(str(quantization.get("quant_method")))
    if quantization.get("load_in_4bit") or quantization.get("load_in_8bit"):
        bits = 4 if quantization.get("load_in_4bit") else 8
    return {2: "q4_1", 3: "q4_1", 4: "q4_1", 8: "q8_0"}.get(bits) if isinstance(bits, int) else None


def _group_bits(quantization: Mapping[str, Any]) -> Any:
    """Of the first group of layers that compressed-tensors describes."""
    groups = quantization.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = group.get("weights") if isinstance(group, dict) else None
    return weights.get("num_bits") if isinstance(weights, dict) else None


def _needed(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    value = _optional(config, names)
    if value is None:
        others = f" (nor {', '.join(names[1:])})" if len(names) > 1 else ""
        raise load_failed(f"config.json: {names[0]} is missing{others}")
    return value


def _optional(config: Mapping[str, Any], names: tuple[str, ...], least: int = 1) -> int | None:
    """The first of these that is there and not null."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_NUMBER:
            raise load_failed(f"config.json: {name} is {value!r}, expected a number from {least} to {MOST_NUMBER}")
        return value
    return None


def _count(config: Mapping[str, Any], name: str) -> int:
    """A number that may be absent or 0."""
    return _optional(config, (name,), least=0) or 0
