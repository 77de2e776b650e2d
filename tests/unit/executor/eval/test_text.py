"""Text becomes the ids that are scored, and bytes are counted as they stand in the file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from services.common.errors import QuireError
from services.executor.eval.text import tokenize
from services.executor.loader import LoadedModel
from services.executor.models.tokenizer_bundle import build_bundle
from tests.fixtures.models import make_rand_model
from tests.fixtures.vocabularies import BOS, BOS_ID, EOS, EOS_ID, Vocabulary, byte_level, sentencepiece
from tests.unit.executor.fake_backend import SPEC, FakeBackend, loaded

CHARACTERS = "aé漢😀\r\n"  # of 1, 2, 3, 4, 1 and 1 bytes


def model_with(path: Path, vocabulary: Vocabulary, vocab_size: int | None = None) -> LoadedModel:
    """A loaded model of which only the tokenizer and the size of the vocabulary are real."""
    bundle = build_bundle(make_rand_model(path, vocabulary=vocabulary))
    spec = dataclasses.replace(SPEC, vocab_size=vocab_size or vocabulary.size)
    return dataclasses.replace(loaded(FakeBackend(spec)), tokenizer_bundle=bundle)


def test_bytes_of_a_character_count_once(tmp_path: Path) -> None:
    passage = tokenize(CHARACTERS, model_with(tmp_path, byte_level(add_bos=False)), None)
    assert passage.prefix == ()
    assert bytes(passage.ids.tolist()) == CHARACTERS.encode()
    assert passage.byte_counts.tolist() == [1, 2, 0, 3, 0, 0, 4, 0, 0, 0, 1, 1]


def test_bytes_of_words(tmp_path: Path) -> None:
    """Spaces belong to words; a letter of no word is several byte tokens."""
    words = sentencepiece(["▁a", "▁é", "at"], add_bos=False)
    passage = tokenize("a éat漢", model_with(tmp_path, words), None)
    assert passage.byte_counts.tolist() == [1, 3, 2, 3, 0, 0]


@pytest.mark.parametrize("text", ["abc", f"{BOS}abc"])
def test_the_beginning_token_goes_before_the_text_once(tmp_path: Path, text: str) -> None:
    passage = tokenize(text, model_with(tmp_path, byte_level()), None)
    assert passage.prefix == (BOS_ID,)
    assert passage.ids.tolist() == [*b"abc"]
    assert passage.byte_counts.tolist() == [1, 1, 1]


def test_a_limit_counts_tokens_of_the_text(tmp_path: Path) -> None:
    passage = tokenize(f"ab{EOS}cd", model_with(tmp_path, byte_level()), 3)
    assert passage.ids.tolist() == [*b"ab", EOS_ID]
    assert passage.byte_counts.tolist() == [1, 1, len(EOS)]


@pytest.mark.parametrize("text", ["", "a"])
def test_too_little_text_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(QuireError, match=rf"--text: it has {len(text)} tokens; at least 2 are needed"):
        tokenize(text, model_with(tmp_path, byte_level()), None)


def test_tokens_beyond_the_model_are_refused(tmp_path: Path) -> None:
    model = model_with(tmp_path, byte_level(["xyz"], add_bos=False), vocab_size=100)
    assert tokenize("ab", model, None).ids.tolist() == [*b"ab"]
    with pytest.raises(QuireError, match=r"--text: its tokenizer makes token 122 of a part, which fake does not have"):
        tokenize("az", model, None)
