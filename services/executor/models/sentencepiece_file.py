"""Reads a SentencePiece `tokenizer.model`: a protobuf message of which few fields matter."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import QuireError, Reason
from services.executor.models.tokenizer_json import TokenType, Vocabulary

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
BPE = 2  # TrainerSpec.model_type


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """The vocabulary, a score per token, and whether text gets a space in front."""

    vocabulary: Vocabulary
    scores: list[float]
    space_prefix: bool


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Reads a BPE model. Raises MODEL_LOAD_FAILED for damaged files and for other kinds, such as unigram."""
    tokens: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    model_type, space_prefix, has_rules = 1, True, False
    try:
        for number, value in _fields(path.read_bytes()):
            if number == 1 and isinstance(value, bytes):  # SentencePiece: piece, score, type
                piece = dict(_fields(value))
                tokens.append(_bytes(piece[1]).decode())
                scores.append(struct.unpack("<f", _bytes(piece.get(2, bytes(4))))[0])
                types.append(int(piece.get(3, TokenType.NORMAL)))
            elif number == 2 and isinstance(value, bytes):  # TrainerSpec
                model_type = int(dict(_fields(value)).get(3, model_type))
            elif number == 3 and isinstance(value, bytes):  # NormalizerSpec
                rules = dict(_fields(value))
                has_rules = bool(rules.get(2))
                space_prefix = bool(rules.get(3, True))
    except (struct.error, KeyError, IndexError, ValueError) as error:
        raise QuireError(Reason.MODEL_LOAD_FAILED, f"{path.name} is no SentencePiece model: {error}") from error
    if not tokens or model_type != BPE or has_rules:
        raise QuireError(
            Reason.MODEL_LOAD_FAILED,
            f"{path.name}: only SentencePiece BPE models without normalization can be read; add a tokenizer.json",
        )
    return SentencePieceModel(Vocabulary(tokens, types), scores, space_prefix)


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a field has the wrong type")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a protobuf message; fixed-width values stay bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        size = {FIXED64: 8, FIXED32: 4}.get(wire)
        if wire == BYTES:
            size, at = _varint(data, at)
        if size is None or at + size > len(data):
            raise ValueError("it is cut or damaged")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
