"""A vocabulary of single bytes: compiles a grammar for the sake of its faults, where the model's own is not at hand."""

from __future__ import annotations

from llguidance import LLTokenizer, TokenizerWrapper

_END = "<|end|>"


class _Letters:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, special_texts: frozenset[str]) -> None:
        special = [text.encode() for text in sorted(special_texts - {_END})] + [_END.encode()]
        self.tokens = [bytes([letter]) for letter in range(256)] + special
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id = len(self.tokens) - 1

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def byte_vocabulary(special_texts: frozenset[str] = frozenset()) -> LLTokenizer:
    """Made in some milliseconds. `special_texts`: the special tokens that a grammar may name."""
    return LLTokenizer(TokenizerWrapper(_Letters(special_texts)))
