"""Text of a growing output: complete characters as soon as they are there, the same text for every split."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from services.gateway.token_pieces import TokenPieces

LONGEST_CHARACTER = 4  # bytes of UTF-8
REPLACEMENT = "\ufffd"


class HasPieces(Protocol):
    """What the detokenizer needs of a tokenizer."""

    def pieces(self, skip_special: bool) -> TokenPieces: ...


class IncrementalDetokenizer:
    """Turns output tokens into text. Bytes of an incomplete character are held until it is complete.

    The joined results equal the text of prompt and output, less the text of the prompt. A character that the prompt
    began and the output completed belongs to the output.
    """

    def __init__(self, tokenizer: HasPieces, prompt_ids: Sequence[int] = (), skip_special: bool = True) -> None:
        self._pieces = tokenizer.pieces(skip_special)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._spaces_to_drop = self._pieces.leading_spaces
        self._prompt_is_cut = False
        self._enter_prompt(prompt_ids)

    def push(self, ids: Sequence[int]) -> str:
        """New complete characters after these tokens; may be empty."""
        return self._decode(self._pieces.join(ids), final=False)

    def flush(self) -> str:
        """What is still held, at the end: a replacement character where bytes are missing."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool) -> str:
        if self._spaces_to_drop and data:
            kept = data.lstrip(b" ") if data[:1] == b" " else data
            dropped = min(len(data) - len(kept), self._spaces_to_drop)
            data = data[dropped:]
            self._spaces_to_drop = self._spaces_to_drop - dropped if not data else 0
        text = self._decoder.decode(data, final)
        if self._prompt_is_cut and (text or final):
            # The prompt's text shows the replacement of its broken last character already.
            self._prompt_is_cut = False
            return text.removeprefix(REPLACEMENT)
        return text

    def _enter_prompt(self, ids: Sequence[int]) -> None:
        for token_id in ids:
            piece = self._pieces[token_id]
            spaces = len(piece) - len(piece.lstrip(b" "))
            self._spaces_to_drop = max(self._spaces_to_drop - spaces, 0) if spaces == len(piece) else 0
            if not self._spaces_to_drop:
                break
        tail = b""
        for token_id in reversed(ids):
            tail = self._pieces[token_id] + tail
            if len(tail) >= LONGEST_CHARACTER:
                break
        tail = tail[-LONGEST_CHARACTER + 1 :]
        for start in range(len(tail)):
            if tail[start] >= 0xC0:  # the first byte of a character
                self._decoder.reset()
                self._decoder.decode(tail[start:])
        self._prompt_is_cut = bool(self._decoder.getstate()[0])
