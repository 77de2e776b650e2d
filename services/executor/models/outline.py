"""What a model is like, read from its config.json or the headers of its files: no weight is touched or downloaded."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import QuireError, Reason
from services.executor.kv_bytes import KvDims
from services.executor.models.catalogue import CATALOGUE
from services.executor.models.config_fields import read_sizes
from services.executor.models.fields import read_object
from services.executor.models.gguf_file import ARCHITECTURES, ROPE_FACTORS
from services.executor.models.gguf_metadata import read_header
from services.executor.models.hf import canonical_name
from services.executor.models.parameters import ParameterCount, count_parameters
from services.executor.models.safetensors_file import SafetensorsFile
from services.executor.models.source import HUB_ID, fetch_config, resolve
from services.executor.models.weight_index import INDEX, shard_names
from services.executor.models.weights import load_failed


@dataclass(frozen=True, slots=True)
class Weights:
    """How many weights there are, and what they take as they are stored."""

    parameters: ParameterCount
    is_exact: bool  # of the number; an estimate for architectures that no backend computes
    dtype: str | None  # as stored; None where the config states none that is known
    stored_bytes: int | None  # None where no file says so
    source: str  # for people: what they were counted from


@dataclass(frozen=True, slots=True)
class Outline:
    """A model without its weights. `notes` are for people."""

    architecture: str
    kv: KvDims
    head_count: int
    context_length: int | None
    weights: Weights
    notes: tuple[str, ...]


def read_outline(source: str) -> Outline:
    """Of a folder, a config.json, a .gguf file, a catalogue name or a hub id, whose config.json alone is fetched.

    Raises MODEL_NOT_FOUND or MODEL_LOAD_FAILED, naming what is missing.
    """
    path = _locate(source)
    return _of_gguf(path) if path.suffix != ".json" else _of_config(path)


def _locate(source: str) -> Path:
    """A config.json or a GGUF file."""
    path = Path(source).expanduser()
    if source not in CATALOGUE and path.is_file() and path.suffix == ".json":
        return path
    match = None if source in CATALOGUE or path.exists() else HUB_ID.fullmatch(source)
    if match and not source.endswith(".gguf"):
        return fetch_config(match["repo"])
    if match and match["file"]:
        raise QuireError(
            Reason.MODEL_NOT_FOUND, f"{source}: nothing so large is downloaded for a plan; name the local .gguf file"
        )
    found = resolve(source)
    return found / "config.json" if found.is_dir() else found


def _of_config(path: Path) -> Outline:
    config = read_object(path)
    sizes = read_sizes(config)
    parameters = count_parameters(sizes.layers)
    weights = _stored_beside(path, sizes.dtype, parameters, sizes.is_supported) or Weights(
        parameters, sizes.is_supported and sizes.dtype in ("fp32", "bf16", "fp16"), sizes.dtype, None, path.name
    )
    return Outline(sizes.architecture, sizes.kv, sizes.head_count, sizes.context_length, weights, sizes.notes)


def _stored_beside(path: Path, dtype: str | None, parameters: ParameterCount, is_supported: bool) -> Weights | None:
    """Weights by the headers of the safetensors files beside a config.json, or by their index alone."""
    index, shards, total = path.with_name(INDEX), [path.with_name("model.safetensors")], None
    if index.is_file():
        shards = [path.with_name(name) for name in shard_names(index)]
        metadata = read_object(index).get("metadata", {})
        if not isinstance(metadata, dict):
            raise load_failed(f"{index}: no index of weights: metadata is no object")
        total = metadata.get("total_size")
    if shards and all(shard.is_file() for shard in shards):
        return _of_shards(shards, dtype, parameters, is_supported)
    return Weights(parameters, is_supported, dtype, total, INDEX) if isinstance(total, int) else None


def _of_shards(shards: list[Path], dtype: str | None, parameters: ParameterCount, is_supported: bool) -> Weights:
    formats: Counter[str] = Counter()
    matrices = vectors = 0
    for shard in shards:
        for name, (format_, shape, begin, end) in SafetensorsFile(shard).entries.items():
            if canonical_name(name) is not None:
                formats[format_] += end - begin
                matrices, vectors = _add(matrices, vectors, shape)
    names = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
    source = "the files' headers"
    if not formats.keys() <= names.keys():  # quantized: words hold several weights, and scales are none
        return Weights(parameters, is_supported, dtype, formats.total(), source)
    most = formats.most_common(1)[0][0] if formats else ""
    return Weights(ParameterCount(matrices, vectors), True, names.get(most, dtype), formats.total(), source)


def _of_gguf(path: Path) -> Outline:
    header = read_header(path, arrays="none")
    fields, architecture = header.fields, str(header.fields.get("general.architecture", "none"))
    if fields.get("split.count", 1) not in (0, 1):
        raise load_failed("GGUF files split in parts are not supported; merge them first")

    def number(key: str, default: int | None = None) -> int:
        value = fields.get(f"{architecture}.{key}", default)
        if isinstance(value, list):
            raise load_failed(f"{path}: metadata {architecture}.{key} differs between layers, which cannot be counted")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise load_failed(f"{path}: metadata {architecture}.{key} is {value!r}, expected a number above 0")
        return value

    heads = number("attention.head_count")
    head_size = number("attention.key_length", number("embedding_length") // heads)
    value_size = number("attention.value_length", head_size)
    kv = KvDims(number("block_count"), number("attention.head_count_kv", heads), head_size, value_size)
    notes = []
    if f"{architecture}.attention.kv_lora_rank" in fields:
        rank = number("attention.kv_lora_rank") + number("rope.dimension_count", head_size)
        kv = KvDims(kv.layer_count, 1, rank, 0)
        notes.append("latent attention: one compressed vector a token and layer instead of keys and values")
    if architecture not in ARCHITECTURES:
        notes.append(f"no backend computes {architecture}")
    matrices = vectors = 0
    formats: Counter[str] = Counter()
    for name, info in header.tensors.items():
        if name != ROPE_FACTORS:
            formats[info.format] += info.byte_count
            matrices, vectors = _add(matrices, vectors, info.shape)
    weights = Weights(
        parameters=ParameterCount(matrices, vectors),
        is_exact=True,
        dtype="+".join(name.lower() for name, _ in formats.most_common(2)),
        stored_bytes=formats.total(),
        source="the file's header",
    )
    return Outline(architecture, kv, heads, number("context_length"), weights, tuple(notes))


def _add(matrices: int, vectors: int, shape: tuple[int, ...]) -> tuple[int, int]:
    count = math.prod(shape)
    return (matrices + count, vectors) if len(shape) > 1 else (matrices, vectors + count)
