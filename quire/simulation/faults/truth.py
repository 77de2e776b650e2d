"""What must come out: the next token is a hash of all before it, as they are really found in the KV that is read."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

VOCAB, EOS = 1000, 0
END_IN, GUESSES = 40, 64
"""About one token in so many ends the text; choices from the second number on are luck with drafts."""


def next_token(context: Sequence[int], seed: int, choice: int) -> int:
    """Depends on every token before it and its place."""
    salt = (seed * 64 + choice).to_bytes(16, "little")
    digest = hashlib.blake2b(array("i", context).tobytes(), digest_size=4, salt=salt).digest()
    value = int.from_bytes(digest, "little")
    return EOS if value % END_IN == 0 else 1 + value % (VOCAB - 1)


def guess(tokens: Sequence[int], seed: int, choice: int, most: int, quality: float) -> list[int]:
    """The tokens that follow, up to `most`: each right with that probability, and at times fewer."""
    known, drafts = list(tokens), list[int]()
    for _ in range(most):
        luck = next_token(known, seed, choice + GUESSES) / VOCAB
        if luck > 0.95:
            break
        token = next_token(known, seed, choice)
        drafts.append(token if luck < quality else VOCAB - 1 - token)
        known.append(drafts[-1])
    return drafts


def answer(prompt: Sequence[int], seed: int, choice: int, most: int, *, ends: bool) -> list[int]:
    """The output of a choice computed alone: `most` tokens, or up to the end token where that `ends` it."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + most:
        tokens.append(next_token(tokens, seed, choice))
        if ends and tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]
