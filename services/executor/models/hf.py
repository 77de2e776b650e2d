"""Opens a Hugging Face folder: config.json and safetensors, single or sharded. Llama, Mistral and Qwen2.

Matrices are plain, or quantized as `services.executor.quant` reads them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.executor.models.fields import Fields, read_object
from services.executor.models.safetensors_file import SafetensorsFile
from services.executor.models.spec import ModelSpec, RopeScaling
from services.executor.models.weight_index import INDEX, shard_names
from services.executor.models.weights import (
    PLAIN_FORMATS,
    Format,
    QuantizedTensor,
    Shape,
    StoredTensor,
    Tensor,
    check_shapes,
    check_spec,
    expected_shapes,
    load_failed,
)
from services.executor.quant.parts import StoredLayer
from services.executor.quant.registry import LABEL_FILES, find_scheme, label_in
from services.executor.quant.scheme import Label

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")

TOP = {"model.embed_tokens.weight": "embedding", "model.norm.weight": "final_norm", "lm_head.weight": "head"}
LAYER = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    **{f"self_attn.{part}_proj": part for part in ("q", "k", "v", "o")},
    **{f"mlp.{part}_proj": part for part in ("gate", "up", "down")},
}
_LAYER_NAME = re.compile(r"model\.layers\.([0-9]{1,6})\.(.+)\.(weight|bias)")
_NO_WEIGHTS = re.compile(r".*(rotary_emb\.inv_freq|self_attn\.[qkv]_scale|\.[qkv]_proj\.(output|[qkv])_scale)")
"""Buffers, and scales of keys and values for caches in FP8."""

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

_Place = tuple[SafetensorsFile, str]


def canonical_name(name: str) -> str | None:
    """The canonical name, or None for buffers that hold no weights."""
    if name in TOP:
        return TOP[name]
    match = _LAYER_NAME.fullmatch(name)
    if match and match[2] in LAYER:
        return f"layers.{int(match[1])}.{LAYER[match[2]]}" + ("_bias" if match[3] == "bias" else "")
    return None if _NO_WEIGHTS.fullmatch(name) else name


def matrix_part(name: str) -> tuple[str, str] | None:
    """Canonical matrix and part, for names of what quantized matrices consist of beside weight and bias."""
    module, _, part = name.rpartition(".")
    matrix = canonical_name(f"{module}.weight")
    if part in ("weight", "bias") or matrix is None or matrix == f"{module}.weight":
        return None
    return matrix, part


class HfCheckpoint:
    """An opened folder."""

    def __init__(self, folder: Path) -> None:
        config = read_object(folder / "config.json")
        generation = folder / "generation_config.json"
        weights = [SafetensorsFile(path) for path in _weight_files(folder)]
        label_file, label = _find_label(folder, config)
        # What is stored means something else under another label.
        self._files = [file.path for file in weights] + ([] if label is None else [label_file])
        self._places, parts = _sort_names(folder, weights)
        spec = spec_from_config(config, read_object(generation) if generation.exists() else {})
        # Biases are what the file holds: older configs of Qwen2 do not mention theirs.
        has = self._places.keys()
        self.spec = check_spec(
            replace(
                spec,
                attention_bias="layers.0.q_bias" in has,
                output_bias="layers.0.o_bias" in has,
                mlp_bias="layers.0.gate_bias" in has,
            )
        )
        self._quantized = self._open_quantized(parts, label)
        check_shapes(self)

    def shapes(self) -> Mapping[str, Shape]:
        plain = {name: file.entries[stored][1] for name, (file, stored) in self._places.items()}
        return plain | {name: tensor.shape for name, tensor in self._quantized.items()}

    def formats(self) -> Mapping[str, Format]:
        plain = {name: file.entries[stored][0] for name, (file, stored) in self._places.items()}
        return {**plain, **{name: tensor.format for name, tensor in self._quantized.items()}}

    def tensor(self, name: str) -> Tensor:
        if name in self._quantized:
            return self._quantized[name]
        file, stored = self._places[name]
        format_, shape, data = file.read(stored)
        return StoredTensor(name, shape, format_, data)

    def files(self) -> list[Path]:
        return self._files

    def _open_quantized(self, parts: dict[str, dict[str, _Place]], label: Label | None) -> dict[str, QuantizedTensor]:
        """Every matrix that is not plain, checked. Takes weights that belong to such from the plain tensors."""
        expected = expected_shapes(self.spec)
        for name, (file, stored) in list(self._places.items()):
            is_matrix = len(expected.get(name, ())) == 2
            if is_matrix and (name in parts or file.entries[stored][0] not in PLAIN_FORMATS):
                parts.setdefault(name, {})["weight"] = self._places.pop(name)
        if self.spec.tied_embeddings:
            parts.pop("head", None)
        if label is None and parts:
            name, found = next(iter(parts.items()))
            raise load_failed(
                f"tensor {name} is stored as {', '.join(sorted(found))}, but no quantization_config says how"
            )
        if label is None:
            return {}
        scheme = find_scheme(label)
        if not parts:
            raise load_failed(f"quantization_config says {label.get('quant_method')}, but no matrix is stored so")
        return {name: scheme.open(_stored_layer(name, expected.get(name), found)) for name, found in parts.items()}


def _find_label(folder: Path, config: Mapping[str, Any]) -> tuple[Path, Label | None]:
    """What says how the checkpoint is quantized, and the file that holds it; None where it is plain."""
    label = label_in(config)
    if label is None:
        for name, method in LABEL_FILES.items():
            if (folder / name).is_file():
                return folder / name, {"quant_method": method, **read_object(folder / name)}
    return folder / "config.json", label


def _sort_names(
    folder: Path, files: Sequence[SafetensorsFile]
) -> tuple[dict[str, _Place], dict[str, dict[str, _Place]]]:
    """Where tensors are by canonical name, and where the parts of quantized matrices are."""
    places: dict[str, _Place] = {}
    parts: dict[str, dict[str, _Place]] = {}
    for file in files:
        for name in file.entries:
            canonical = canonical_name(name)
            if canonical is None:
                continue
            found = matrix_part(name)
            kept, key = (places, canonical) if found is None else (parts.setdefault(found[0], {}), found[1])
            if key in kept:
                raise load_failed(f"{folder}: tensor {name} occurs twice")
            kept[key] = (file, name)
    return places, parts


def _stored_layer(name: str, shape: Shape | None, places: Mapping[str, _Place]) -> StoredLayer:
    parts = {part: file.part(stored) for part, (file, stored) in places.items()}
    module = next(iter(places.values()))[1].rpartition(".")[0]
    if shape is None or len(shape) != 2:
        raise load_failed(f"tensor {name} is stored as {', '.join(sorted(parts))}, but is no matrix of this model")
    return StoredLayer(name, module, (shape[0], shape[1]), parts)


def spec_from_config(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelSpec:
    """The spec that config.json and generation_config.json describe; biases are left to the weights."""
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else "none"
    if architecture not in ARCHITECTURES:
        raise load_failed(f"architecture {architecture} is not supported; supported: {', '.join(ARCHITECTURES)}")
    fields = Fields("config.json", config)
    _refuse_unsupported(fields)
    heads = fields.whole("num_attention_heads")
    hidden = fields.whole("hidden_size")
    rope = fields.inner("rope_parameters")
    begin = fields.token_ids("bos_token_id")
    ends = [*Fields("generation_config.json", generation).token_ids("eos_token_id"), *fields.token_ids("eos_token_id")]
    return ModelSpec(
        architecture=fields.text("model_type", architecture),
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.whole("intermediate_size"),
        layer_count=fields.whole("num_hidden_layers"),
        head_count=heads,
        kv_head_count=fields.whole("num_key_value_heads", heads),
        head_size=fields.whole("head_dim", hidden // max(heads, 1)),
        context_length=fields.whole("max_position_embeddings"),
        norm_epsilon=fields.real("rms_norm_eps", 1e-6),
        rope_theta=rope.real("rope_theta", fields.real("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(rope if config.get("rope_parameters") else fields.inner("rope_scaling")),
        tied_embeddings=fields.flag("tie_word_embeddings", default=False),
        eos_token_ids=tuple(dict.fromkeys(ends)),
        bos_token_id=begin[0] if begin else None,
    )


def _refuse_unsupported(fields: Fields) -> None:
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise load_failed(f"activation {activation} is not supported; only silu is")
    if fields.real("partial_rotary_factor", 1.0) != 1.0:
        raise load_failed("partial_rotary_factor is not supported")
    window = fields.whole("sliding_window", 0) if fields.flag("use_sliding_window", default=True) else 0
    if window and window < fields.whole("max_position_embeddings"):
        raise load_failed(f"a sliding window of {window} tokens is not supported")


def _rope_scaling(rope: Fields) -> RopeScaling | None:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", rope.real("factor"))
    if kind != "llama3":
        raise load_failed(f"rope scaling {kind} is not supported; linear and llama3 are")
    return RopeScaling(
        "llama3",
        rope.real("factor"),
        rope.real("low_freq_factor"),
        rope.real("high_freq_factor"),
        rope.whole("original_max_position_embeddings"),
    )


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.exists():
        if not (folder / "model.safetensors").is_file():
            others = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
            why = f"; {others[0]} may run code when it is opened, so it never is: convert it" if others else ""
            raise load_failed(f"{folder} holds neither model.safetensors nor its index{why}")
        return [folder / "model.safetensors"]
    names = shard_names(index)
    for name in names:
        if not (folder / name).is_file():
            raise load_failed(f"{index} names {name}, which is missing")
    return [folder / name for name in names]
