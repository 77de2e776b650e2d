"""Opens a GGUF file: llama and qwen2 architectures in every format that gguf.quants dequantizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from services.executor.models.fields import Fields
from services.executor.models.ggml_formats import is_readable
from services.executor.models.gguf_metadata import GgufHeader, TensorInfo, read_header
from services.executor.models.spec import ModelSpec, RopeScaling
from services.executor.models.weights import Bytes, Shape, StoredTensor, check_shapes, check_spec, load_failed

ARCHITECTURES = ("llama", "qwen2")

_TOP = {"token_embd": "embedding", "output_norm": "final_norm", "output": "head"}
_LAYER = {
    "attn_norm": "attention_norm",
    "ffn_norm": "mlp_norm",
    "attn_output": "o",
    **{f"attn_{part}": part for part in ("q", "k", "v")},
    **{f"ffn_{part}": part for part in ("gate", "up", "down")},
}
_LAYER_NAME = re.compile(r"blk\.([0-9]{1,6})\.(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"


def canonical_name(name: str) -> str:
    """The canonical name; a name that is none of ours stays as it is and is refused later."""
    if name.removesuffix(".weight") in _TOP:
        return _TOP[name.removesuffix(".weight")]
    match = _LAYER_NAME.fullmatch(name)
    if match and match[2] in _LAYER:
        return f"layers.{int(match[1])}.{_LAYER[match[2]]}" + ("_bias" if match[3] == "bias" else "")
    return name


class GgufCheckpoint:
    """An opened file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        header = read_header(path, arrays="none")
        self._bytes: Bytes = np.memmap(path, np.uint8, mode="c")  # private: arrays count as writable
        self._places: dict[str, TensorInfo] = {}
        for stored, info in header.tensors.items():
            name = canonical_name(stored)
            if name == ROPE_FACTORS:
                continue
            if name in self._places:
                raise load_failed(f"{path}: tensor {stored} occurs twice, also under another name")
            self._places[name] = info
        for name, info in self._places.items():
            if not is_readable(info.format):
                raise load_failed(f"{path}: tensor {name} has format {info.format}, which cannot be dequantized")
        self.spec = check_spec(spec_from_header(header, self._rope_factors(header)))
        check_shapes(self)

    def shapes(self) -> Mapping[str, Shape]:
        return {name: info.shape for name, info in self._places.items()}

    def formats(self) -> Mapping[str, str]:
        return {name: info.format for name, info in self._places.items()}

    def tensor(self, name: str) -> StoredTensor:
        info = self._places[name]
        data = self._read(info)
        part = name.rpartition(".")[2].removesuffix("_bias")
        if self.spec.architecture == "llama" and part in ("q", "k"):
            heads = self.spec.head_count if part == "q" else self.spec.kv_head_count
            rows = data.reshape(info.shape[0], -1)  # a bias too: one value a row
            data = split_halves(rows, heads).reshape(data.shape)
        return StoredTensor(name, info.shape, info.format, data)

    def files(self) -> list[Path]:
        return [self._path]

    def _read(self, info: TensorInfo) -> Bytes:
        return self._bytes[info.offset : info.offset + info.byte_count].reshape(-1, info.row_bytes)

    def _rope_factors(self, header: GgufHeader) -> tuple[float, ...]:
        info = header.tensors.get(ROPE_FACTORS)
        if info is None:
            return ()
        if info.format != "F32" or len(info.shape) != 1 or not info.byte_count:
            raise load_failed(
                f"{self._path}: {ROPE_FACTORS} is {list(info.shape)} {info.format}, expected a row of F32"
            )
        return tuple(self._read(info).reshape(-1).view(np.float32).tolist())


def split_halves(rows: Bytes, heads: int) -> Bytes:
    """Rows of q or k, from GGUF llama's order (a rotary pair side by side) to (i, i + head_size / 2)."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def spec_from_header(header: GgufHeader, rope_factors: tuple[float, ...]) -> ModelSpec:
    """The spec that metadata and tensor names describe."""
    tensors, general = header.tensors, Fields("metadata", header.fields)
    architecture = general.text("general.architecture", "none")
    if architecture not in ARCHITECTURES:
        raise load_failed(f"architecture {architecture} is not supported; supported: {', '.join(ARCHITECTURES)}")
    if general.whole("split.count", 1) > 1:
        raise load_failed("GGUF files split in parts are not supported; merge them first")
    if "token_embd.weight" not in tensors:
        raise load_failed("tensor token_embd.weight is missing")
    start = f"{architecture}."
    fields = Fields(
        "metadata", {key.removeprefix(start): value for key, value in header.fields.items() if key.startswith(start)}
    )
    if fields.whole("expert_count", 0):
        raise load_failed("mixtures of experts are not supported")
    hidden, heads = fields.whole("embedding_length"), fields.whole("attention.head_count")
    head_size = fields.whole("attention.key_length", hidden // max(heads, 1))
    if fields.whole("rope.dimension_count", head_size) != head_size:
        raise load_failed("rotary positions over a part of the head are not supported")
    return ModelSpec(
        architecture=architecture,
        vocab_size=(*tensors["token_embd.weight"].shape, 0)[0],
        hidden_size=hidden,
        intermediate_size=fields.whole("feed_forward_length"),
        layer_count=fields.whole("block_count"),
        head_count=heads,
        kv_head_count=fields.whole("attention.head_count_kv", heads),
        head_size=head_size,
        context_length=fields.whole("context_length"),
        norm_epsilon=fields.real("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.real("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(fields, rope_factors),
        attention_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        tied_embeddings="output.weight" not in tensors,
        eos_token_ids=_end_ids(general),
        bos_token_id=next(iter(general.token_ids("tokenizer.ggml.bos_token_id")), None),
    )


def _rope_scaling(fields: Fields, factors: tuple[float, ...]) -> RopeScaling | None:
    if factors:
        return RopeScaling("factors", factors=factors)
    kind = fields.text("rope.scaling.type", "none")
    if kind == "linear":
        return RopeScaling("linear", fields.real("rope.scaling.factor"))
    if kind != "none":
        raise load_failed(f"rope scaling {kind} is not supported")
    return None


def _end_ids(fields: Fields) -> tuple[int, ...]:
    """End of sequence, turn and message, as far as the file names them."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    return tuple(dict.fromkeys(id_ for name in names for id_ in fields.token_ids(f"tokenizer.ggml.{name}")))
