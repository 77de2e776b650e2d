"""A model's tokens as grammars see them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence

from llguidance import LLTokenizer

from services.common.errors import QuireError, Reason


class Vocabulary:
    """Immutable. Making one takes about half a second and 40 MB for 49,000 tokens."""

    def __init__(self, tokenizer_json: str, vocab_size: int, end_ids: Sequence[int]) -> None:
        """`end_ids` are the model's end tokens. UNSUPPORTED where grammars cannot work with this vocabulary."""
        own = [token for token in end_ids if token < vocab_size]
        if not own:
            raise _unsupported("the model has no token that ends a text")
        try:
            self.tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=own)
        except ValueError as error:
            raise _unsupported(str(error)) from error
        self.end_ids = frozenset(own)
        """A mask allows these where the grammar may end."""

    @classmethod
    def from_bundle(cls, bundle: bytes, vocab_size: int, end_ids: Sequence[int]) -> Vocabulary:
        """Of a tokenizer bundle."""
        with zipfile.ZipFile(io.BytesIO(bundle)) as files:
            return cls(files.read("tokenizer.json").decode(), vocab_size, end_ids)


def _unsupported(why: str) -> QuireError:
    return QuireError(
        Reason.UNSUPPORTED, f"constraint: this model's output cannot be guided: {why}", field="constraint"
    )
