"""Builds the `tokenizer.json` of a vocabulary that came without one."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.errors import QuireError, Reason
from services.executor.models.pre_tokenizers import PreTokenizer

_MOST_LETTERS = 1024


class TokenType(enum.IntEnum):
    """What a token is for; the numbers of SentencePiece and GGUF."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens in the order of their ids, with a type each."""

    tokens: Sequence[str]
    types: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.types) != len(self.tokens):
            raise QuireError(Reason.MODEL_LOAD_FAILED, "the vocabulary has more or fewer types than tokens")
        if len(set(self.tokens)) != len(self.tokens):
            raise QuireError(Reason.MODEL_LOAD_FAILED, "the vocabulary has a token twice")


def byte_level_bpe(vocabulary: Vocabulary, merges: Sequence[str], scheme: PreTokenizer) -> dict[str, Any]:
    """A GPT-2 style vocabulary. A merge is its two parts with a space between."""
    split = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in scheme.patterns
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return _tokenizer(
        vocabulary,
        normalizer=None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*split, byte_level]},
        decoder=byte_level,
        model=_bpe(vocabulary, _known(merges, vocabulary), ignore_merges=scheme.ignore_merges),
    )


def sentencepiece_bpe(vocabulary: Vocabulary, scores: Sequence[float], *, space_prefix: bool) -> dict[str, Any]:
    """A SentencePiece BPE vocabulary: "▁" is a space, unknown letters fall back to bytes.

    `space_prefix`: text gets a space in front, which decoding takes away.
    """
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prefix = [{"type": "Prepend", "prepend": "▁"}] if space_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if space_prefix else []
    unknown = next(
        (token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == TokenType.UNKNOWN),
        None,
    )
    return _tokenizer(
        vocabulary,
        normalizer={"type": "Sequence", "normalizers": [*prefix, spaces]},
        pre_tokenizer=None,
        decoder={
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        model=_bpe(vocabulary, _merges_by_score(vocabulary, scores))
        | {"byte_fallback": True, "fuse_unk": True, "unk_token": unknown},
    )


def _known(merges: Sequence[str], vocabulary: Vocabulary) -> Iterator[list[str]]:
    """Merges in their order. Those that make no token are useless, and refused by the tokenizer library."""
    known = set(vocabulary.tokens)
    for merge in merges:
        # The first part may itself be a space in odd vocabularies, so the search begins at 1.
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if left in known and right in known and left + right in known:
            yield [left, right]


def _merges_by_score(vocabulary: Vocabulary, scores: Sequence[float]) -> Iterator[list[str]]:
    """Every way to make a token from two, best score first: SentencePiece merges whatever makes the best token."""
    mergeable = {
        token: at
        for at, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind not in (TokenType.BYTE, TokenType.CONTROL, TokenType.UNKNOWN)
    }
    longest = max(map(len, mergeable), default=0)
    if longest > _MOST_LETTERS:  # there are as many ways to cut one
        raise QuireError(Reason.MODEL_LOAD_FAILED, f"the vocabulary has a token of {longest} letters")
    for token in sorted(mergeable, key=lambda token: (-scores[mergeable[token]], mergeable[token])):
        for cut in range(1, len(token)):
            if token[:cut] in mergeable and token[cut:] in mergeable:
                yield [token[:cut], token[cut:]]


def _bpe(vocabulary: Vocabulary, merges: Iterator[list[str]], *, ignore_merges: bool = False) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": {token: at for at, token in enumerate(vocabulary.tokens)},
        "merges": list(merges),
    }


def _tokenizer(vocabulary: Vocabulary, **parts: Mapping[str, Any] | None) -> dict[str, Any]:
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    added = [
        {
            "id": at,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind in special,
        }
        for at, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (*special, TokenType.USER_DEFINED)
    ]
    head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "post_processor": None}
    return head | parts
