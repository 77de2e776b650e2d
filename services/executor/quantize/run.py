"""A whole model, layer by layer: one layer in memory, the calibration text beside it."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.common.errors import QuireError
from services.executor.models.checkpoint import open_checkpoint
from services.executor.models.weights import Checkpoint, expected_shapes
from services.executor.quant.parts import Part
from services.executor.quantize.calibration import draw_text, given_text
from services.executor.quantize.choice import Choice, Source
from services.executor.quantize.finite import check_computed
from services.executor.quantize.grid import Grid
from services.executor.quantize.hf_files import changed_config, model_files
from services.executor.quantize.hf_names import module_name, plain_name
from services.executor.quantize.layer import Layer, matrix_names, read_layer
from services.executor.quantize.methods import Matrices, Method, find_method
from services.executor.quantize.mixed import check_bits, spend
from services.executor.quantize.output_folder import OutputFolder
from services.executor.quantize.plain import DTYPES, narrowed, plain_format, plain_part, top_parts
from services.executor.quantize.progress import Bar
from services.executor.quantize.recipe import Recipe, candidates, plan
from services.executor.quantize.sensitivity import SAMPLES, measure_losses
from services.executor.quantize.stream import CalibrationStream, embed


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asks for."""

    source: Source
    choice: Choice


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
    source = request.source
    if source.threads:
        torch.set_num_threads(source.threads)
    checkpoint = open_checkpoint(source.path)
    spec = checkpoint.spec
    recipe = plan(request.choice, spec)
    if request.choice.bits_per_weight is not None:
        check_bits(candidates(request.choice, spec), spec, request.choice.bits_per_weight)
    plain = plain_format(checkpoint)
    # What is no use, or cannot be written, is known before there is a folder.
    files = model_files(source.path, spec, plain, recipe.label())
    tokens = given_text(source, spec) if recipe.needs_text else None
    top = top_parts(checkpoint, plain)
    folder = OutputFolder(out, _identity(request, checkpoint, recipe))
    folder.keep_top(top)
    del top  # the layers need the memory
    if recipe.needs_text and tokens is None:
        with torch.inference_mode():
            tokens = _drawn_text(source, folder, bar)
    if request.choice.bits_per_weight is not None:
        assert tokens is not None
        recipe = replace(recipe, grids=_mixed_grids(request.choice, checkpoint, folder, tokens, bar))
        files["config.json"] = changed_config(files["config.json"], {"quantization_config": recipe.label()})
    method = find_method(recipe, spec, DTYPES[plain])
    with torch.inference_mode():
        _quantize_layers(checkpoint, recipe, method, folder, plain, tokens, bar)
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
            prefix = f"layers.{index}."
            layer = _as_stored(prefix, read_layer(checkpoint, index), plain)
            grids = {name.removeprefix(prefix): grid for name, grid in recipe.grids.items() if name.startswith(prefix)}
            with _naming(f"layer {index}"):
                matrices = method.quantize(layer, grids, stream)
                if stream is not None:
                    check_computed("what leaves it", stream.hidden)
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
            tensors[plain_name(prefix + name)] = plain_part(prefix + name, values, plain)
    return tensors


def _drawn_text(source: Source, folder: OutputFolder, bar: Bar) -> NDArray[np.int32]:
    """What the model writes itself; what it wrote in an earlier run, where it came so far."""
    tokens = folder.tokens()
    if tokens is None:
        tokens = draw_text(source, bar)
        folder.keep_tokens(tokens)
    return tokens


def _identity(request: Request, checkpoint: Checkpoint, recipe: Recipe) -> Mapping[str, Any]:
    """What a later run must have in common with this one to go on with its layers."""
    source = request.source
    text = "its own" if source.text is None else hashlib.sha256(source.text.encode()).hexdigest()
    status = [(path.name, path.stat()) for path in checkpoint.files()]
    return {
        "model": [[name, found.st_size, found.st_mtime_ns] for name, found in status],
        "quantization": recipe.label(),
        "method": str(recipe),
        "bits per weight": [request.choice.bits_per_weight, request.choice.mixed_bits],
        "calibration": [text, source.size.samples, source.size.context] if recipe.needs_text else None,
    }


def _as_stored(prefix: str, layer: Layer, plain: str) -> Layer:
    """With what stays plain rounded to how it is stored."""
    return {
        name: values if values.dim() > 1 else narrowed(prefix + name, values, plain).float()
        for name, values in layer.items()
    }


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Errors say where they came about."""
    try:
        yield
    except QuireError as error:
        raise QuireError(error.reason, f"{what}: {error}") from error
