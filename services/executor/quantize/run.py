"""A whole model, layer by layer: one layer in memory, the calibration text beside it."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.common.errors import invalid
from services.executor.models.checkpoint import open_checkpoint
from services.executor.models.weights import Checkpoint, expected_shapes
from services.executor.quant.parts import Part
from services.executor.quantize.calibration import cut_text, draw_text
from services.executor.quantize.choice import CalibrationSize, Choice
from services.executor.quantize.grid import Grid
from services.executor.quantize.hf_files import model_files
from services.executor.quantize.hf_names import module_name, plain_name
from services.executor.quantize.layer import Layer, matrix_names, read_layer
from services.executor.quantize.methods import Matrices, Method, find_method
from services.executor.quantize.mixed import check_bits, spend
from services.executor.quantize.output_folder import OutputFolder
from services.executor.quantize.plain import DTYPES, plain_format, plain_part, stored_plain, top_names
from services.executor.quantize.recipe import Recipe, candidates, plan
from services.executor.quantize.sensitivity import SAMPLES, measure_losses
from services.executor.quantize.stream import CalibrationStream, embed

Bar = Callable[[str, int, int, str], AbstractContextManager[Callable[[int], object]]]
"""A progress bar: what is done, how much of it is done and in all, the unit; gives what hears of more."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asks for."""

    source: str  # as the user named the model
    path: Path
    choice: Choice
    text: str | None  # None: what the model writes itself
    size: CalibrationSize
    threads: int


@dataclass(frozen=True, slots=True)
class Report:
    """What was made."""

    recipe: Recipe
    source_bytes: int  # of the files that the weights came from
    bytes: int  # of weights
    matrix_bits: float  # of quantized matrices: bits per weight, with scales
    samples: int  # of calibration text; 0 where the method needs none
    seconds: float


def quantize_model(request: Request, out: Path, bar: Bar) -> Report:
    """Makes a Hugging Face folder. Raises MODEL_LOAD_FAILED, INVALID_FIELD, and NOT_FINITE."""
    started = time.monotonic()
    if request.threads:
        torch.set_num_threads(request.threads)
    checkpoint = open_checkpoint(request.path)
    spec = checkpoint.spec
    recipe = plan(request.choice, spec)
    if request.choice.bits_per_weight is not None:
        check_bits(candidates(request.choice, spec), spec, request.choice.bits_per_weight)
    if recipe.needs_text and not 2 <= request.size.context <= spec.context_length:
        raise invalid("--context", f"{request.size.context} is not in 2..{spec.context_length}, the model's own")
    plain = plain_format(checkpoint)
    files = model_files(request.path, spec, plain, recipe.label())  # what cannot be written is known before the work
    folder = OutputFolder(out, _identity(request, checkpoint, recipe))
    with torch.inference_mode():
        tokens = _tokens(request, checkpoint, folder, bar) if recipe.needs_text else None
    if request.choice.bits_per_weight is not None:
        assert tokens is not None
        recipe = replace(recipe, grids=_mixed_grids(request.choice, checkpoint, folder, tokens, bar))
        files = model_files(request.path, spec, plain, recipe.label())
    method = find_method(recipe, spec, DTYPES[plain])
    with torch.inference_mode():
        _quantize_layers(checkpoint, recipe, method, folder, plain, tokens, bar)
        folder.keep_top({plain_name(name): stored_plain(checkpoint, name, plain) for name in top_names(checkpoint)})
    size = folder.finish(spec.layer_count, files)
    shapes = expected_shapes(spec)
    quantized = sum(math.prod(shapes[name]) for name in matrix_names(spec))
    plain_bytes = 2 * (sum(map(math.prod, shapes.values())) - quantized)
    return Report(
        recipe=recipe,
        source_bytes=sum(path.stat().st_size for path in checkpoint.files()),
        bytes=size,
        matrix_bits=8 * (size - plain_bytes) / quantized,
        samples=0 if tokens is None else len(tokens),
        seconds=time.monotonic() - started,
    )


def _quantize_layers(
    checkpoint: Checkpoint,
    recipe: Recipe,
    method: Method,
    folder: OutputFolder,
    plain: str,
    tokens: NDArray[np.int32] | None,
    bar: Bar,
) -> None:
    """From where an earlier run ended."""
    spec, earlier = checkpoint.spec, folder.progress()
    stream = None
    if tokens is not None and earlier.layers < spec.layer_count:
        hidden = earlier.hidden if earlier.hidden is not None else embed(checkpoint, tokens)
        stream = CalibrationStream(spec, hidden)
    with bar("quantizing", earlier.layers, spec.layer_count, "layer") as done:
        for index in range(earlier.layers, spec.layer_count):
            layer = _as_stored(read_layer(checkpoint, index), plain)
            prefix = f"layers.{index}."
            grids = {name.removeprefix(prefix): grid for name, grid in recipe.grids.items() if name.startswith(prefix)}
            matrices = method.quantize(layer, grids, stream)
            tensors = _tensors(prefix, layer, matrices, recipe, plain)
            folder.keep_layer(index, tensors, None if stream is None else stream.hidden)
            done(1)


def _mixed_grids(
    choice: Choice, checkpoint: Checkpoint, folder: OutputFolder, tokens: NDArray[np.int32], bar: Bar
) -> dict[str, Grid]:
    """A grid for each matrix; those of an earlier run, where it came so far."""
    assert choice.bits_per_weight is not None
    spec = checkpoint.spec
    grids = candidates(choice, spec)
    kept = folder.choice()
    if kept is None:
        with bar("measuring", 0, 2 * spec.layer_count, "layer") as done:
            losses = measure_losses(
                checkpoint, tokens[:: -(-len(tokens) // SAMPLES)], grids, by_importance=choice.act_order, done=done
            )
        kept = {name: grids.index(grid) for name, grid in spend(losses, spec, choice.bits_per_weight).items()}
        folder.keep_choice(kept)
    return {name: grids[kept[name]] for name in matrix_names(spec)}


def _tensors(prefix: str, layer: Layer, matrices: Matrices, recipe: Recipe, plain: str) -> dict[str, Part]:
    """A layer as the files hold it."""
    tensors: dict[str, Part] = {}
    for name, values in layer.items():
        if name in matrices:
            module = module_name(prefix + name)
            tensors |= {f"{module}.{part}": held for part, held in recipe.pack(matrices[name]).items()}
        else:
            tensors[plain_name(prefix + name)] = plain_part(values, plain)
    return tensors


def _tokens(request: Request, checkpoint: Checkpoint, folder: OutputFolder, bar: Bar) -> NDArray[np.int32]:
    """The calibration text; of an earlier run, the same."""
    kept = folder.tokens()
    if kept is not None:
        return kept
    if request.text is not None:
        tokens = cut_text(request.text, request.path, checkpoint.spec.vocab_size, request.size)
    else:
        count = request.size.samples * (request.size.context - 1)
        with bar("drawing text", 0, count, "tok") as drawn:
            tokens = draw_text(request.source, request.threads, request.size, drawn)
    folder.keep_tokens(tokens)
    return tokens


def _identity(request: Request, checkpoint: Checkpoint, recipe: Recipe) -> Mapping[str, Any]:
    """What a later run must have in common with this one to go on with its layers."""
    text = "its own" if request.text is None else hashlib.sha256(request.text.encode()).hexdigest()
    status = [(path.name, path.stat()) for path in checkpoint.files()]
    return {
        "model": [[name, found.st_size, found.st_mtime_ns] for name, found in status],
        "quantization": recipe.label(),
        "method": str(recipe),
        "bits per weight": [request.choice.bits_per_weight, request.choice.mixed_bits],
        "calibration": [text, request.size.samples, request.size.context] if recipe.needs_text else None,
    }


def _as_stored(layer: Layer, plain: str) -> Layer:
    """With what stays plain rounded to how it is stored."""
    dtype = DTYPES[plain]
    return {name: values if values.dim() > 1 else values.to(dtype).float() for name, values in layer.items()}
