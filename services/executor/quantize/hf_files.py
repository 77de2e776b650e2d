"""The files beside the weights that make a folder a Hugging Face model: copied, or made from a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from services.executor.models.fields import read_object
from services.executor.models.gguf_metadata import read_header
from services.executor.models.gguf_tokenizer import tokenizer_from_gguf
from services.executor.models.rope import inverse_frequencies
from services.executor.models.spec import ModelSpec, RopeScaling
from services.executor.models.weights import load_failed

_COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_LLAMA3_FACTORS = (8.0, 32.0)  # of Llama 3.1 and 3.2, whose other numbers are the defaults
_DTYPES = {"BF16": "bfloat16", "F16": "float16"}


def model_files(path: Path, spec: ModelSpec, plain_format: str, label: Mapping[str, Any]) -> dict[str, bytes]:
    """By name; config.json, which makes the folder a model, is last. Raises MODEL_LOAD_FAILED.

    `plain_format` is that of the tensors that are not quantized, `label` the `quantization_config`.
    """
    if path.is_dir():
        files = {name: (path / name).read_bytes() for name in _COPIED if (path / name).is_file()}
        config = read_object(path / "config.json")
    else:
        files, config = _tokenizer_files(path, spec), config_of(spec)
        files["generation_config.json"] = _json(_token_ids(spec))
    config.pop("compression_config", None)
    dtype = next((name for name in ("dtype", "torch_dtype") if name in config), "torch_dtype")
    config |= {dtype: _DTYPES[plain_format], "quantization_config": dict(label)}
    return {**files, "config.json": _json(config)}


def changed_config(config: bytes, fields: Mapping[str, Any]) -> bytes:
    """config.json with some fields in place of its own."""
    return _json(json.loads(config) | dict(fields))


def config_of(spec: ModelSpec) -> dict[str, Any]:
    """config.json of a GGUF file's model."""
    return {
        "architectures": [_ARCHITECTURES[spec.architecture]],
        "model_type": spec.architecture,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.layer_count,
        "num_attention_heads": spec.head_count,
        "num_key_value_heads": spec.kv_head_count,
        "head_dim": spec.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": spec.context_length,
        "rms_norm_eps": spec.norm_epsilon,
        "rope_theta": spec.rope_theta,
        "rope_scaling": _rope_scaling(spec),
        "attention_bias": spec.attention_bias,
        "mlp_bias": spec.mlp_bias,
        "tie_word_embeddings": spec.tied_embeddings,
        **_token_ids(spec),
    }


def _token_ids(spec: ModelSpec) -> dict[str, Any]:
    return {"bos_token_id": spec.bos_token_id, "eos_token_id": list(spec.eos_token_ids)}


def _rope_scaling(spec: ModelSpec) -> dict[str, Any] | None:
    scaling = spec.rope_scaling
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    wanted = inverse_frequencies(spec.head_size, spec.rope_theta, scaling)
    for factor in _LLAMA3_FACTORS:
        named = RopeScaling("llama3", factor)
        if np.allclose(inverse_frequencies(spec.head_size, spec.rope_theta, named), wanted, rtol=1e-3, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": named.low_frequency_factor,
                "high_freq_factor": named.high_frequency_factor,
                "original_max_position_embeddings": named.original_context_length,
            }
    raise load_failed("the file's rope factors are none that config.json has a name for")


def _tokenizer_files(path: Path, spec: ModelSpec) -> dict[str, bytes]:
    """Those of a GGUF file."""
    tokenizer, found = tokenizer_from_gguf(read_header(path).fields)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": found["add_bos"],
        "model_max_length": spec.context_length,
        "clean_up_tokenization_spaces": False,
        **{name: text for name, text in found.items() if name in ("bos_token", "eos_token", "unk_token", "pad_token")},
    }
    if found["add_bos"] and "bos_token" in found and spec.bos_token_id is not None:
        tokenizer["post_processor"] = _begin_with(found["bos_token"], spec.bos_token_id)
    files = {"tokenizer.json": _json(tokenizer), "tokenizer_config.json": _json(config)}
    if found["chat_template"]:
        files["chat_template.jinja"] = found["chat_template"].encode()
    return files


def _begin_with(token: str, token_id: int) -> dict[str, Any]:
    """Puts a token in front of every text."""
    begin = {"SpecialToken": {"id": token, "type_id": 0}}
    text = [{"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB")]
    return {
        "type": "TemplateProcessing",
        "single": [begin, text[0]],
        "pair": [begin, text[0], text[1]],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, indent=1).encode()
