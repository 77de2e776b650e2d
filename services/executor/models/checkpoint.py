"""Opens whatever a model path is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from services.common.errors import invalid
from services.executor.models.spec import ModelSpec
from services.executor.models.weights import Checkpoint, load_failed


def open_checkpoint(path: Path) -> Checkpoint:
    """A folder in Hugging Face's layout or a `.gguf` file. Raises MODEL_LOAD_FAILED for anything else."""
    if path.is_dir():
        from services.executor.models.hf import HfCheckpoint

        return HfCheckpoint(path)
    if path.is_file() and path.suffix == ".gguf":
        from services.executor.models.gguf_file import GgufCheckpoint

        return GgufCheckpoint(path)
    raise load_failed(f"{path} is neither a model folder nor a .gguf file")


def load_spec(path: Path) -> ModelSpec:
    """The spec alone, from a path that `open_checkpoint` takes."""
    return open_checkpoint(path).spec


def with_context_length(spec: ModelSpec, context_length: int | None) -> ModelSpec:
    """The spec with a shorter context; None leaves the model's own. Raises INVALID_FIELD beyond it."""
    if context_length is None:
        return spec
    if not 1 <= context_length <= spec.context_length:
        raise invalid("context_length", f"{context_length} is not in 1..{spec.context_length}, the model's own")
    return replace(spec, context_length=context_length)
