"""The text that activations are measured on: a file's, or what the model writes itself."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from services.common.errors import invalid
from services.executor.eval.drawn import MOST_SEQUENCES, draw_passages
from services.executor.eval.options import Choice, load
from services.executor.models.tokenizer_bundle import load_bundle
from services.executor.quantize.choice import CalibrationSize

Int32 = NDArray[np.int32]

_LETTERS_A_TOKEN = 32  # of a file, so much is read at most


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


def draw_text(model: str, threads: int, size: CalibrationSize, drawn: Callable[[int], object]) -> Int32:
    """Samples [samples, context] that the model writes; it is in memory as long as it does.

    `drawn` hears of tokens as they come.
    """
    loaded = load(Choice("MODEL", model, "auto", "auto"), threads, size.context, MOST_SEQUENCES)
    passages = draw_passages(loaded, size.samples * (size.context - 1), size.context - 1, drawn)
    return np.array([[*passage.prefix, *passage.ids] for passage in passages], np.int32)
