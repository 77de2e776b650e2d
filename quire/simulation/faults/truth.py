"""What must come out: the next token is a hash of all before it, as they are really found in the KV that is read."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

VOCAB, EOS = 1000, 0
END_IN = 40
"""About one token in so many ends the text."""


def next_token(context: Sequence[int], seed: int, choice: int) -> int:
    """Depends on every token before it and its place."""
    salt = (seed * 64 + choice).to_bytes(16, "little")
    digest = hashlib.blake2b(array("i", context).tobytes(), digest_size=4, salt=salt).digest()
    value = int.from_bytes(digest, "little")
    return EOS if value % END_IN == 0 else 1 + value % (VOCAB - 1)


def answer(prompt: Sequence[int], seed: int, choice: int, most: int, *, ends: bool) -> list[int]:
    """The output of a choice computed alone: `most` tokens, or up to the end token where that `ends` it."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + most:
        tokens.append(next_token(tokens, seed, choice))
        if ends and tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]
