"""The bytes that each token adds to the text, worked out from the tokenizer's decoder.

Text is the concatenation of these bytes, read as UTF-8. That makes decoding the same however the output is split,
which piecewise calls of a tokenizer library do not promise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from services.common.errors import QuireError, Reason

Transform = Callable[[str | bytes], str | bytes]
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenPieces(dict[int, bytes]):
    """Token id -> bytes, filled as ids are asked for. Unknown ids and those in `skip` add nothing."""

    def __init__(
        self, text_of: Callable[[int], str | None], decoder: Mapping[str, Any] | None, skip: Collection[int] = ()
    ) -> None:
        super().__init__((token_id, b"") for token_id in skip)
        self._text_of = text_of
        self._transforms, self.leading_spaces = _compile(decoder)

    def __missing__(self, token_id: int) -> bytes:
        # Threads may compute a piece twice; both find the same.
        piece: str | bytes | None = self._text_of(token_id)
        if piece is None:
            return b""
        for transform in self._transforms:
            piece = transform(piece)
        self[token_id] = piece.encode() if isinstance(piece, str) else piece
        return self[token_id]

    def join(self, ids: Sequence[int]) -> bytes:
        """The bytes of consecutive tokens."""
        return b"".join(map(self.__getitem__, ids))


def _compile(decoder: Mapping[str, Any] | None) -> tuple[list[Transform], int]:
    """Per-token transforms of a `tokenizer.json` decoder, and how many leading spaces it drops from a whole text."""
    if decoder is None:
        raise _unsupported("none")
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    transforms: list[Transform] = []
    leading_spaces = 0
    fused = False
    for step in steps:
        kind = step["type"]
        if kind == "Strip" and fused and step["content"] == " " and not step["stop"]:
            leading_spaces = step["start"]
        elif kind == "Fuse":
            fused = True
        elif fused:
            raise _unsupported(f"{kind} after Fuse")
        elif kind == "ByteLevel":
            transforms.append(_byte_level)
        elif kind == "ByteFallback":
            transforms.append(_byte_fallback)
        elif kind == "Replace" and "String" in step["pattern"]:
            transforms.append(_replace(step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            transforms.append(_replace(step["replacement"], " "))
            leading_spaces = int(step.get("prepend_scheme", "always") != "never")
        else:
            raise _unsupported(kind)
    return transforms, leading_spaces


def _unsupported(decoder: str) -> QuireError:
    return QuireError(Reason.UNSUPPORTED, f"the tokenizer's decoder ({decoder}) is not supported")


def _replace(old: str, new: str) -> Transform:
    return lambda piece: piece.replace(old, new) if isinstance(piece, str) else piece


def _byte_fallback(piece: str | bytes) -> str | bytes:
    match = BYTE_TOKEN.fullmatch(piece) if isinstance(piece, str) else None
    return bytes([int(match[1], 16)]) if match else piece


def _byte_level(piece: str | bytes) -> str | bytes:
    """A token with any letter outside the byte alphabet, such as an added one, stands for itself."""
    try:
        return bytes(BYTE_OF_LETTER[letter] for letter in piece) if isinstance(piece, str) else piece
    except KeyError:
        return piece


def _byte_alphabet() -> dict[str, int]:
    """The printable letter that stands for each byte: itself where printable in Latin-1, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


BYTE_OF_LETTER = _byte_alphabet()
