"""A smaller model as a plain Hugging Face folder: measured, chosen, cut, taught and written."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from services.common.errors import invalid
from services.executor.models.checkpoint import open_checkpoint
from services.executor.models.spec import ModelSpec
from services.executor.models.weights import Checkpoint, expected_shapes
from services.executor.prune.cut import cut
from services.executor.prune.distill import Learned, Lesson, Model, distill
from services.executor.prune.importance import Kept, choose, measure
from services.executor.prune.target import Target
from services.executor.quantize.calibration import draw_text, given_text
from services.executor.quantize.choice import Source
from services.executor.quantize.finite import read_tensor
from services.executor.quantize.hf_files import model_files
from services.executor.quantize.hf_names import plain_name
from services.executor.quantize.layer import Layer, read_layer
from services.executor.quantize.output_folder import OutputFolder
from services.executor.quantize.plain import plain_format, plain_part, top_parts
from services.executor.quantize.progress import Bar
from services.executor.quantize.stream import embed


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asks for."""

    source: Source
    target: Target
    distill_seconds: float  # 0: not at all


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
    """Makes a Hugging Face folder; `clock` is in seconds. Raises MODEL_LOAD_FAILED, INVALID_FIELD, and NOT_FINITE."""
    started = clock()
    source = request.source
    if source.threads:
        torch.set_num_threads(source.threads)
    checkpoint = open_checkpoint(source.path)
    spec = checkpoint.spec
    smaller = request.target.smaller(spec)
    plain = plain_format(checkpoint)
    # What is no use, or cannot be written, is known before there is a folder.
    files = model_files(source.path, spec, plain, {})
    tokens = given_text(source, spec)
    if request.distill_seconds and (source.size.samples if tokens is None else len(tokens)) < 2:
        raise invalid("--samples", "distillation holds a sample back, so it takes two at least")
    top = top_parts(checkpoint, plain)
    folder = OutputFolder(out, {"command": "prune"})
    folder.clear()
    if tokens is None:
        tokens = draw_text(source, bar)
    with bar("measuring", 0, spec.layer_count, "layer") as done:
        measured = measure(checkpoint, tokens, done)
    kept = choose(measured.layers, smaller)
    learned = None
    if request.distill_seconds:
        model = Model(smaller, list(_cut_layers(checkpoint, kept)), *_ends(checkpoint))
        lesson = Lesson(embed(checkpoint, tokens), measured.hidden, model.final_norm.clone())
        with bar("distilling", 0, round(request.distill_seconds), "s") as done:
            learned = distill(model, lesson, request.distill_seconds, done, clock)
        _keep(folder, model.layers, smaller.layer_count, plain, bar)
        top[plain_name("final_norm")] = plain_part("final_norm", model.final_norm, plain)
    else:
        _keep(folder, _cut_layers(checkpoint, kept), smaller.layer_count, plain, bar)
    folder.keep_top(top)
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


def _cut_layers(checkpoint: Checkpoint, kept: list[Kept]) -> Iterator[Layer]:
    for own in kept:
        yield cut(read_layer(checkpoint, own.index), own, checkpoint.spec)


def _ends(checkpoint: Checkpoint) -> tuple[Tensor, Tensor]:
    """Final norm and head in fp32."""
    head = "embedding" if checkpoint.spec.tied_embeddings else "head"
    return read_tensor(checkpoint, "final_norm"), read_tensor(checkpoint, head)


def _keep(folder: OutputFolder, layers: Iterable[Layer], count: int, plain: str, bar: Bar) -> None:
    """One layer after the other, so that where they are cut as they are kept only one is in memory."""
    with bar("writing", 0, count, "layer") as done:
        for index, layer in enumerate(layers):
            named = {f"layers.{index}.{name}": values for name, values in layer.items()}
            tensors = {plain_name(name): plain_part(name, values, plain) for name, values in named.items()}
            folder.keep_layer(index, tensors, None)
            done(1)
