"""Text of a growing output is the text of the whole, however it is split."""

from __future__ import annotations

import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.detokenizer import IncrementalDetokenizer
from services.gateway.tokenizer import ModelTokenizer
from tests.fixtures.vocabularies import BOS_ID, EOS_ID, Vocabulary, byte_level, sentencepiece

EMOJI = "😀".encode()
BYTES = byte_level([*(bytes([byte]) for byte in EMOJI), "A", "�"])
PIECES = sentencepiece(["▁Hello", "▁world", "lo", "▁▁"])
SPACE = PIECES.tokenizer["model"]["vocab"]["▁"]
HELLO, WORLD = (PIECES.tokenizer["model"]["vocab"][piece] for piece in ("▁Hello", "▁world"))


def make(words: Vocabulary) -> ModelTokenizer:
    return ModelTokenizer(words.to_json(), {})


TOKENIZERS = {"bytes": make(BYTES), "pieces": make(PIECES)}
REFERENCES = {
    "bytes": tokenizers.Tokenizer.from_str(BYTES.to_json()),
    "pieces": tokenizers.Tokenizer.from_str(PIECES.to_json()),
}


def stream(name: str, prompt: list[int], parts: list[list[int]], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(TOKENIZERS[name], prompt, skip)
    return [*(detokenizer.push(part) for part in parts), detokenizer.flush()]


def one_by_one(ids: list[int]) -> list[list[int]]:
    return [[token_id] for token_id in ids]


def test_a1_a_character_comes_whole_with_its_last_byte() -> None:
    twice = [*range(260, 264), *EMOJI, 264]
    deltas = stream("bytes", [BOS_ID, 104], one_by_one(twice))
    assert deltas == ["", "", "", "😀", "", "", "", "😀", "A", ""]


def test_a6_spaces_between_words_stay() -> None:
    assert stream("pieces", [1, HELLO], one_by_one([WORLD, SPACE, SPACE, HELLO])) == [" world", " ", " ", " Hello", ""]


def test_a6_the_first_space_of_a_text_goes_once_only() -> None:
    assert "".join(stream("pieces", [1], one_by_one([SPACE, SPACE, HELLO]))) == "  Hello"[:1] + " Hello"
    assert "".join(stream("pieces", [1, HELLO], one_by_one([SPACE, WORLD]))) == "  world"


def test_a6_a_byte_fallback_token_after_a_space() -> None:
    accent = [3 + byte for byte in "é".encode()]
    assert stream("pieces", [1, HELLO], one_by_one([SPACE, *accent, HELLO])) == [" ", "", "é", " Hello", ""]


def test_a_character_that_the_prompt_began_belongs_to_the_output() -> None:
    assert "".join(stream("bytes", [104, *EMOJI[:2]], one_by_one([*EMOJI[2:], 264]))) == "😀A"
    # Where the output does not complete it, the prompt's text shows the damage, and the output begins clean.
    assert "".join(stream("bytes", [104, *EMOJI[:2]], [[264]])) == "A"
    assert "".join(stream("bytes", [*EMOJI[:3]], [])) == ""


def test_broken_bytes_show_once_they_are_known_to_be_broken() -> None:
    assert stream("bytes", [104], one_by_one([0xC3, 104, 0x80])) == ["", "�h", "�", ""]
    assert stream("bytes", [104], one_by_one([105, 0xF0, 0x9F])) == ["i", "", "", "�"]


def test_a_replacement_character_of_the_model_is_not_held() -> None:
    assert stream("bytes", [104], [[265], [104]]) == ["�", "h", ""]


def test_special_tokens_are_left_out_or_kept() -> None:
    assert "".join(stream("bytes", [104], [[104, EOS_ID], [105]])) == "hi"
    assert "".join(stream("bytes", [104], [[104, EOS_ID], [105]], skip=False)) == "h<|eos|>i"


@st.composite
def texts(draw: st.DrawFn) -> tuple[str, list[int], list[list[int]], bool]:
    """A valid text's tokens, cut into a prompt of whole characters and an output in parts."""
    name = draw(st.sampled_from(sorted(TOKENIZERS)))
    ids = TOKENIZERS[name].encode(draw(st.text(st.sampled_from("aé€😀 H lo")))) or [104]
    output = TOKENIZERS[name].encode(draw(st.text(st.sampled_from("aé€😀 Hello world"))))
    cuts = sorted(draw(st.lists(st.integers(0, len(output)), max_size=8)))
    parts = [output[start:end] for start, end in zip([0, *cuts], [*cuts, len(output)], strict=True)]
    return name, ids, parts, draw(st.booleans())


@given(texts())
def test_a6_every_split_gives_the_reference_text(case: tuple[str, list[int], list[list[int]], bool]) -> None:
    name, prompt, parts, skip = case
    output = [token_id for part in parts for token_id in part]
    whole = REFERENCES[name].decode([*prompt, *output], skip_special_tokens=skip)
    before = REFERENCES[name].decode(prompt, skip_special_tokens=skip)
    deltas = stream(name, prompt, parts, skip)
    assert before + "".join(deltas) == whole
    assert not any("�" in delta for delta in deltas)


@given(st.sampled_from(sorted(TOKENIZERS)), st.lists(st.integers(0, 265)), st.data())
def test_a6_every_split_gives_the_same_text_even_of_broken_bytes(
    name: str, ids: list[int], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(ids)))
    whole = "".join(stream(name, [104], [ids]))
    assert "".join(stream(name, [104], [ids[:cut], ids[cut:]])) == whole
    assert "".join(stream(name, [104], one_by_one(ids))) == whole
