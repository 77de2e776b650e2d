"""A whole model, layer by layer: one layer in memory, the calibration text beside it."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.common.errors import invalid
from services.executor.models.checkpoint import open_checkpoint
from services.executor.models.dequantize import pieces
from services.executor.models.weights import Checkpoint, StoredTensor, expected_shapes
from services.executor.quant.parts import Part
from services.executor.quantize.calibration import cut_text, draw_text
from services.executor.quantize.choice import CalibrationSize, Choice
from services.executor.quantize.hf_files import model_files
from services.executor.quantize.hf_names import module_name, plain_name
from services.executor.quantize.layer import Layer, matrix_names, read_layer
from services.executor.quantize.methods import Matrices, Method, find_method
from services.executor.quantize.output_folder import OutputFolder
from services.executor.quantize.recipe import Recipe, plan
from services.executor.quantize.stream import CalibrationStream, embed

Bar = Callable[[str, int, int, str], AbstractContextManager[Callable[[int], object]]]
"""A progress bar: what is done, how much of it is done and in all, the unit; gives what hears of more."""

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}


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
    if recipe.needs_text and not 2 <= request.size.context <= spec.context_length:
        raise invalid("--context", f"{request.size.context} is not in 2..{spec.context_length}, the model's own")
    plain = _plain_format(checkpoint)
    files = model_files(request.path, spec, plain, recipe.label())  # what cannot be written is known before the work
    folder = OutputFolder(out, _identity(request, checkpoint, recipe))
    method = find_method(recipe, spec, _DTYPES[plain])
    with torch.inference_mode():
        tokens = _tokens(request, checkpoint, folder, bar) if recipe.needs_text else None
        _quantize_layers(checkpoint, recipe, method, folder, plain, tokens, bar)
        folder.keep_top({plain_name(name): _plain(checkpoint, name, plain) for name in _top_names(checkpoint)})
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


def _tensors(prefix: str, layer: Layer, matrices: Matrices, recipe: Recipe, plain: str) -> dict[str, Part]:
    """A layer as the files hold it."""
    tensors: dict[str, Part] = {}
    for name, values in layer.items():
        if name in matrices:
            module = module_name(prefix + name)
            tensors |= {f"{module}.{part}": held for part, held in recipe.pack(matrices[name]).items()}
        else:
            tensors[plain_name(prefix + name)] = _part(values, plain)
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
        "calibration": [text, request.size.samples, request.size.context] if recipe.needs_text else None,
    }


def _plain_format(checkpoint: Checkpoint) -> str:
    """Of tensors that are not quantized: the source's where it has 16 bits, else BF16, which holds all numbers."""
    stored = checkpoint.formats()["embedding"]
    return stored if isinstance(stored, str) and stored in _DTYPES else "BF16"


def _as_stored(layer: Layer, plain: str) -> Layer:
    """With what stays plain rounded to how it is stored."""
    dtype = _DTYPES[plain]
    return {name: values if values.dim() > 1 else values.to(dtype).float() for name, values in layer.items()}


def _top_names(checkpoint: Checkpoint) -> list[str]:
    return [name for name in expected_shapes(checkpoint.spec) if not name.startswith("layers.")]


def _plain(checkpoint: Checkpoint, name: str, plain: str) -> Part:
    """A tensor in 16 bits; where it is stored so, no copy is made."""
    tensor = checkpoint.tensor(name)
    if isinstance(tensor, StoredTensor) and tensor.format == plain:
        return Part(plain, tensor.shape, tensor.data.reshape(-1))
    out = torch.empty(tensor.shape, dtype=_DTYPES[plain])
    rows = out.view(-1, tensor.shape[-1])
    for start, piece in pieces(tensor):
        rows[start : start + len(piece)] = torch.from_numpy(piece)
    return _part(out, plain)


def _part(values: Tensor, plain: str) -> Part:
    narrow = values.to(_DTYPES[plain])
    return Part(plain, tuple(values.shape), narrow.contiguous().view(torch.uint8).reshape(-1).numpy())
