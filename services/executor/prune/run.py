"""A smaller model as a plain Hugging Face folder: measured, chosen, cut, taught and written."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.common.errors import invalid
from services.executor.models.checkpoint import open_checkpoint
from services.executor.models.dequantize import to_float32
from services.executor.models.spec import ModelSpec
from services.executor.models.weights import Checkpoint, expected_shapes
from services.executor.prune.cut import cut
from services.executor.prune.distill import Learned, Lesson, Model, distill
from services.executor.prune.importance import Kept, choose, measure
from services.executor.prune.target import Target
from services.executor.quant.parts import Part
from services.executor.quantize.calibration import cut_text, draw_text
from services.executor.quantize.choice import CalibrationSize
from services.executor.quantize.hf_files import model_files
from services.executor.quantize.hf_names import plain_name
from services.executor.quantize.layer import Layer, read_layer
from services.executor.quantize.output_folder import OutputFolder
from services.executor.quantize.plain import plain_format, plain_part, stored_plain, top_names
from services.executor.quantize.run import Bar
from services.executor.quantize.stream import embed


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asks for."""

    source: str  # as the user named the model
    path: Path
    target: Target
    text: str | None  # None: what the model writes itself
    size: CalibrationSize
    distill_seconds: float  # 0: not at all
    threads: int


@dataclass(frozen=True, slots=True)
class Report:
    """What was made."""

    layers: tuple[int, ...]  # of the source, that are left
    source_spec: ModelSpec
    spec: ModelSpec
    source_weights: int
    weights: int
    bytes: int
    samples: int
    learned: Learned | None
    seconds: float


def prune_model(request: Request, out: Path, bar: Bar, clock: Callable[[], float] = time.monotonic) -> Report:
    """Makes a Hugging Face folder; `clock` is in seconds. Raises MODEL_LOAD_FAILED and INVALID_FIELD."""
    started = clock()
    if request.threads:
        torch.set_num_threads(request.threads)
    checkpoint = open_checkpoint(request.path)
    spec = checkpoint.spec
    smaller = request.target.smaller(spec)
    if not 2 <= request.size.context <= spec.context_length:
        raise invalid("--context", f"{request.size.context} is not in 2..{spec.context_length}, the model's own")
    plain = plain_format(checkpoint)
    files = model_files(request.path, spec, plain, {})  # what cannot be written is known before the work
    folder = OutputFolder(out, _identity(request, checkpoint, smaller))
    tokens = _tokens(request, spec, bar)
    if request.distill_seconds and len(tokens) < 2:
        raise invalid("--samples", "distillation holds a sample back, so it takes two at least")
    with bar("measuring", 0, spec.layer_count, "layer") as done:
        measured = measure(checkpoint, tokens, done)
    kept = choose(measured.layers, smaller)
    top = {name: stored_plain(checkpoint, name, plain) for name in top_names(checkpoint)}
    learned = None
    if request.distill_seconds:
        model = Model(smaller, list(_cut_layers(checkpoint, kept)), *_ends(checkpoint))
        lesson = Lesson(embed(checkpoint, tokens), measured.hidden, model.final_norm.clone())
        with bar("distilling", 0, round(request.distill_seconds), "s") as done:
            learned = distill(model, lesson, request.distill_seconds, done, clock)
        _keep(folder, model.layers, smaller.layer_count, plain, bar)
        top["final_norm"] = plain_part(model.final_norm, plain)
    else:
        _keep(folder, _cut_layers(checkpoint, kept), smaller.layer_count, plain, bar)
    folder.keep_top({plain_name(name): part for name, part in top.items()})
    layers = tuple(own.index for own in kept)
    files["config.json"] = smaller_config(files["config.json"], smaller, layers)
    size = folder.finish(smaller.layer_count, files)
    before, after = (sum(map(math.prod, expected_shapes(own).values())) for own in (spec, smaller))
    return Report(layers, spec, smaller, before, after, size, len(tokens), learned, clock() - started)


def smaller_config(config: bytes, spec: ModelSpec, layers: tuple[int, ...]) -> bytes:
    """config.json of what is left; `layers` are those of the source."""
    found = json.loads(config)
    found.pop("quantization_config", None)
    found |= {
        "num_hidden_layers": spec.layer_count,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.head_count,
        "num_key_value_heads": spec.kv_head_count,
        "head_dim": spec.head_size,  # no longer the hidden size by the heads
    }
    kinds = found.get("layer_types")
    if isinstance(kinds, list):
        found["layer_types"] = [kinds[index] for index in layers]
    return json.dumps(found, ensure_ascii=False, indent=1).encode()


def _tokens(request: Request, spec: ModelSpec, bar: Bar) -> NDArray[np.int32]:
    if request.text is not None:
        return cut_text(request.text, request.path, spec.vocab_size, request.size)
    with bar("drawing text", 0, request.size.samples * (request.size.context - 1), "tok") as drawn:
        return draw_text(request.source, request.threads, request.size, drawn)


def _identity(request: Request, checkpoint: Checkpoint, smaller: ModelSpec) -> Mapping[str, Any]:
    """What a run that was ended must have in common with this one, which begins anew in its folder."""
    status = [(path.name, path.stat()) for path in checkpoint.files()]
    text = "its own" if request.text is None else hashlib.sha256(request.text.encode()).hexdigest()
    return {
        "model": [[name, found.st_size, found.st_mtime_ns] for name, found in status],
        "left": [smaller.layer_count, smaller.intermediate_size, smaller.head_count],
        "calibration": [text, request.size.samples, request.size.context],
        "distillation": request.distill_seconds,
    }


def _cut_layers(checkpoint: Checkpoint, kept: list[Kept]) -> Iterator[Layer]:
    for own in kept:
        yield cut(read_layer(checkpoint, own.index), own, checkpoint.spec)


def _ends(checkpoint: Checkpoint) -> tuple[Tensor, Tensor]:
    """Final norm and head in fp32."""
    head = "embedding" if checkpoint.spec.tied_embeddings else "head"
    norm, scores = (torch.from_numpy(to_float32(checkpoint.tensor(name))) for name in ("final_norm", head))
    return norm, scores


def _keep(folder: OutputFolder, layers: Iterable[Layer], count: int, plain: str, bar: Bar) -> None:
    """One layer after the other, so that where they are cut as they are kept only one is in memory."""
    with bar("writing", 0, count, "layer") as done:
        for index, layer in enumerate(layers):
            tensors: dict[str, Part] = {
                plain_name(f"layers.{index}.{name}"): plain_part(values, plain) for name, values in layer.items()
            }
            folder.keep_layer(index, tensors, None)
            done(1)
