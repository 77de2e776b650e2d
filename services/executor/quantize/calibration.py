"""The text that activations are measured on: a file's, or what the model writes itself."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from services.common.errors import invalid
from services.executor.eval.drawn import MOST_SEQUENCES, draw_passages
from services.executor.eval.options import Choice, load
from services.executor.models.spec import ModelSpec
from services.executor.models.tokenizer_bundle import load_bundle
from services.executor.quantize.choice import CalibrationSize, Source
from services.executor.quantize.progress import Bar

Int32 = NDArray[np.int32]

_LETTERS_A_TOKEN = 32  # of a file, so much is read at most


def given_text(source: Source, spec: ModelSpec) -> Int32 | None:
    """Samples of the text that was given, before any work is done; None where the model shall write it.

    Raises INVALID_FIELD.
    """
    size = source.size
    if not 2 <= size.context <= spec.context_length:
        raise invalid("--context", f"{size.context} is not in 2..{spec.context_length}, the model's own")
    return None if source.text is None else cut_text(source.text, source.path, spec.vocab_size, size)


def cut_text(text: str, model: Path, vocab_size: int, size: CalibrationSize) -> Int32:
    """Samples [at most samples, context], spread evenly over the beginning of a text. Raises INVALID_FIELD.

    Each begins with the beginning-of-text token where the model's tokenizer adds one.
    """
    with zipfile.ZipFile(io.BytesIO(load_bundle(model))) as bundle:
        tokenizer = tokenizers.Tokenizer.from_str(bundle.read("tokenizer.json").decode())
        config = json.loads(bundle.read("tokenizer_config.json"))
    start = tokenizer.token_to_id(config.get("bos_token", "")) if config["add_bos"] else None
    room = size.context - (start is not None)
    part = text[: size.samples * size.context * _LETTERS_A_TOKEN]
    ids = np.array(tokenizer.encode_batch([part], add_special_tokens=False)[0].ids, np.int32)
    whole = len(ids) // room
    if whole == 0:
        raise invalid("--calibration", f"it has {len(ids)} tokens; a sample takes {room}")
    if ids.max() >= vocab_size:
        raise invalid("--calibration", f"its tokenizer makes token {ids.max()}, which the model does not have")
    chosen = np.unique(np.linspace(0, whole - 1, min(size.samples, whole)).round().astype(np.int64))
    samples = ids[: whole * room].reshape(whole, room)[chosen]
    return samples if start is None else np.insert(samples, 0, start, axis=1)


def draw_text(source: Source, bar: Bar) -> Int32:
    """Samples [samples, context] that the model writes; it is in memory as long as it does."""
    size = source.size
    loaded = load(Choice("MODEL", source.name, "auto", "auto"), source.threads, size.context, MOST_SEQUENCES)
    count = size.samples * (size.context - 1)
    with bar("drawing text", 0, count, "tok") as drawn:
        passages = draw_passages(loaded, count, size.context - 1, drawn)
    return np.array([[*passage.prefix, *passage.ids] for passage in passages], np.int32)
