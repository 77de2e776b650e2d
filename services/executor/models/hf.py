"""Opens a Hugging Face folder: config.json and safetensors, single or sharded. Llama, Mistral and Qwen2.

Matrices are plain, or quantized as `services.executor.quant` reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.executor.models.safetensors_file import SafetensorsFile
from services.executor.models.spec import ModelSpec, RopeScaling
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

_TOP = {"model.embed_tokens.weight": "embedding", "model.norm.weight": "final_norm", "lm_head.weight": "head"}
_LAYER = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    **{f"self_attn.{part}_proj": part for part in ("q", "k", "v", "o")},
    **{f"mlp.{part}_proj": part for part in ("gate", "up", "down")},
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_NO_WEIGHTS = re.compile(r".*(rotary_emb\.inv_freq|self_attn\.[qkv]_scale|\.[qkv]_proj\.(output|[qkv])_scale)")
"""Buffers, and scales of keys and values for caches in FP8."""

_Place = tuple[SafetensorsFile, str]


def canonical_name(name: str) -> str | None:
    """The canonical name, or None for buffers that hold no weights."""
    if name in _TOP:
        return _TOP[name]
    match = _LAYER_NAME.fullmatch(name)
    if match and match[2] in _LAYER:
        return f"layers.{int(match[1])}.{_LAYER[match[2]]}" + ("_bias" if match[3] == "bias" else "")
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
        config = _read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        weights = [SafetensorsFile(path) for path in _weight_files(folder)]
        label_file, label = _find_label(folder, config)
        # What is stored means something else under another label.
        self._files = [file.path for file in weights] + ([] if label is None else [label_file])
        self._places, parts = _sort_names(folder, weights)
        spec = spec_from_config(config, _read_json(generation) if generation.exists() else {})
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
                return folder / name, {"quant_method": method, **_read_json(folder / name)}
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
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise load_failed(f"architecture {architecture} is not supported; supported: {', '.join(ARCHITECTURES)}")
    _refuse_unsupported(config)
    heads = _number(config, "num_attention_heads")
    hidden = _number(config, "hidden_size")
    rope = config.get("rope_parameters") or {}
    return ModelSpec(
        architecture=str(config.get("model_type", architecture)),
        vocab_size=_number(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_number(config, "intermediate_size"),
        layer_count=_number(config, "num_hidden_layers"),
        head_count=heads,
        kv_head_count=int(config.get("num_key_value_heads") or heads),
        head_size=int(config.get("head_dim") or hidden // max(heads, 1)),
        context_length=_number(config, "max_position_embeddings"),
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        rope_scaling=_rope_scaling(rope or config.get("rope_scaling") or {}),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=_end_ids(generation, config),
        bos_token_id=_first_id(config.get("bos_token_id")),
    )


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise load_failed(f"activation {config['hidden_act']} is not supported; only silu is")
    if float(config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise load_failed("partial_rotary_factor is not supported")
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window and int(window) < _number(config, "max_position_embeddings"):
        raise load_failed(f"a sliding window of {window} tokens is not supported")


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    if kind != "llama3":
        raise load_failed(f"rope scaling {kind} is not supported; linear and llama3 are")
    return RopeScaling(
        "llama3",
        float(rope["factor"]),
        float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]),
        int(rope["original_max_position_embeddings"]),
    )


def _end_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for config in configs:
        ids = config.get("eos_token_id")
        for token_id in ids if isinstance(ids, list) else [ids]:
            if token_id is not None:
                found[int(token_id)] = None
    return tuple(found)


def _first_id(ids: Any) -> int | None:
    first = (ids or [None])[0] if isinstance(ids, list) else ids
    return None if first is None else int(first)


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int):
        raise load_failed(f"config.json: {key} is {value!r}, expected a number")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise load_failed(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise load_failed(f"{path}: expected an object")
    return value


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        if not (folder / "model.safetensors").is_file():
            raise load_failed(f"{folder} holds neither model.safetensors nor its index")
        return [folder / "model.safetensors"]
    names = sorted(set((_read_json(index).get("weight_map") or {}).values()))
    for name in names:
        if Path(name).name != name:
            raise load_failed(f"{index}: shard {name!r} lies outside the folder")
        if not (folder / name).is_file():
            raise load_failed(f"{index} names {name}, which is missing")
    return [folder / name for name in names]
