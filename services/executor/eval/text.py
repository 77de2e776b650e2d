"""A text as the token ids that are scored."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import dataclass

import numpy as np
import tokenizers
from numpy.typing import NDArray

from services.common.errors import invalid
from services.executor.loader import LoadedModel

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens in a row, and what stands before each window of them."""

    prefix: tuple[int, ...]  # the beginning-of-text token, or nothing
    ids: Int32  # [N]
    byte_counts: Int64  # [N] bytes of text per token; a character of several tokens counts for the first


def tokenize(text: str, model: LoadedModel, limit: int | None) -> Passage:
    """The first `limit` tokens of a text as the model's own tokenizer reads it.

    Raises INVALID_FIELD where these are fewer than two, or where one is beyond the model's vocabulary.
    """
    with zipfile.ZipFile(io.BytesIO(model.tokenizer_bundle)) as bundle:
        tokenizer = tokenizers.Tokenizer.from_str(bundle.read("tokenizer.json").decode())
        config = json.loads(bundle.read("tokenizer_config.json"))
    encoding = tokenizer.encode_batch([text], add_special_tokens=False)[0]
    ids = np.array(encoding.ids, np.int32)
    ends = _byte_offsets(text)[np.array([end for _, end in encoding.offsets], np.int64)]
    byte_counts = np.diff(np.maximum.accumulate(ends), prepend=0)
    prefix: tuple[int, ...] = ()
    if config["add_bos"] and (bos := tokenizer.token_to_id(config.get("bos_token", ""))) is not None:
        prefix = (bos,)
        if ids[:1].tolist() == [bos]:
            ids, byte_counts = ids[1:], byte_counts[1:]
    ids, byte_counts = ids[:limit], byte_counts[:limit]
    if len(ids) < 2:
        raise invalid("--text", f"it has {len(ids)} tokens; at least 2 are needed")
    largest = max((*prefix, int(ids.max())))
    if largest >= model.backend.spec.vocab_size:
        raise invalid("--text", f"its tokenizer makes token {largest} of a part, which {model.name} does not have")
    return Passage(prefix, ids, byte_counts)


def reads_alike(text: str, limit: int | None, passage: Passage, reader: LoadedModel, other: LoadedModel) -> bool:
    """Whether another model's tokenizer makes of a text what `reader` did. Raises INVALID_FIELD as `tokenize` does."""
    if other.tokenizer_fingerprint == reader.tokenizer_fingerprint:
        return True
    found = tokenize(text, other, limit)
    return found.prefix == passage.prefix and np.array_equal(found.ids, passage.ids)


def _byte_offsets(text: str) -> Int64:
    """Where in UTF-8 each character begins, and where the last one ends: [characters + 1]."""
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = np.ones(len(points), np.int64)
    for first_of_wider in (0x80, 0x800, 0x10000):
        widths += points >= first_of_wider
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(widths)))
