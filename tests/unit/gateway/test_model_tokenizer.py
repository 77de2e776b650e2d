"""Text to ids and back: one BOS at most, threads, decoders that are not understood."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import QuireError, Reason
from services.gateway.detokenizer import IncrementalDetokenizer
from services.gateway.output.template_facts import Style
from services.gateway.tokenizer import ModelTokenizer
from tests.fixtures.chat_templates import HERMES
from tests.fixtures.vocabularies import (
    BOS,
    BOS_ID,
    CHAT_TEMPLATE,
    EOS,
    EOS_ID,
    Vocabulary,
    byte_level,
    sentencepiece,
    special,
)

BYTES = byte_level(["Hi", "é!", b"\xf0\x9f", b"\x98\x80"])
PIECES = sentencepiece(["▁Hello", "▁world", "▁", "lo", "▁▁"])
MESSAGES = [{"role": "user", "content": "hé"}]


def make(words: Vocabulary = BYTES, **config: Any) -> ModelTokenizer:
    names = {entry["id"]: entry["content"] for entry in words.tokenizer["added_tokens"]}
    base = {"bos_token": names[words.bos_id], "eos_token": names[words.eos_ids[0]], "add_bos": True}
    return ModelTokenizer(words.to_json(), base | {"chat_template": CHAT_TEMPLATE} | config)


@pytest.mark.parametrize("begins", ["", BOS])
def test_p1_text_gets_exactly_one_bos(begins: str) -> None:
    assert make().encode(f"{begins}ab") == [BOS_ID, 97, 98]


def test_p1_a_tokenizer_without_bos_adds_none_and_keeps_a_written_one() -> None:
    tokenizer = make(add_bos=False)
    assert tokenizer.encode("ab") == [97, 98]
    assert tokenizer.encode(f"{BOS}ab") == [BOS_ID, 97, 98]


def test_p1_bos_can_be_left_out() -> None:
    assert make().encode("ab", add_bos=False) == [97, 98]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, "{{ bos_token }}" + CHAT_TEMPLATE])
@pytest.mark.parametrize("words", [BYTES, byte_level(add_bos=False)])
def test_p1_chats_get_exactly_one_bos_whether_or_not_the_template_writes_it(template: str, words: Vocabulary) -> None:
    ids = make(words, chat_template=template).encode_chat(MESSAGES)
    assert ids[0] == BOS_ID
    assert ids.count(BOS_ID) == 1
    without = make(words, chat_template=CHAT_TEMPLATE, add_bos=False).encode_chat(MESSAGES)
    assert ids[1:] == without


def test_ids_equal_the_reference_tokenizer() -> None:
    reference = tokenizers.Tokenizer.from_str(PIECES.to_json())
    for text in ("Hello world", "  two", "naïve 😀", "", "<s>Hello"):
        assert make(PIECES).encode(text, add_bos=False) == reference.encode(text, add_special_tokens=False).ids


@settings(max_examples=40)
@given(st.text())
def test_text_survives_a_round_trip(text: str) -> None:
    for tokenizer in (TOKENIZER, SPM):
        assert tokenizer.decode(tokenizer.encode(text, add_bos=False), skip_special=False) == text


TOKENIZER, SPM = make(), make(PIECES)
VALID = st.lists(st.integers(0, 127) | st.sampled_from([BOS_ID, EOS_ID, 260, 261]))


@given(VALID, st.booleans())
def test_decode_equals_the_reference_tokenizer(ids: list[int], skip: bool) -> None:
    reference = tokenizers.Tokenizer.from_str(BYTES.to_json())
    assert TOKENIZER.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


@given(st.lists(st.sampled_from([0, 1, 2, *range(3 + 32, 3 + 127), *range(259, PIECES.size)])), st.booleans())
def test_decode_equals_the_reference_tokenizer_with_byte_fallback(ids: list[int], skip: bool) -> None:
    reference = tokenizers.Tokenizer.from_str(PIECES.to_json())
    assert SPM.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


def test_ids_beyond_the_vocabulary_add_nothing() -> None:
    assert make().decode([104, 10_000_000, -1, 2**40, 105]) == "hi"


def test_bytes_of_tokens() -> None:
    tokenizer = make()
    assert tokenizer.token_bytes(0xE9) == b"\xe9"
    assert tokenizer.token_bytes(262) == b"\xf0\x9f"
    assert tokenizer.token_bytes(EOS_ID) == b"<|eos|>"
    assert make(PIECES).token_bytes(3 + 0xE9) == b"\xe9"
    assert make(PIECES).token_bytes(PIECES.tokenizer["model"]["vocab"]["▁world"]) == b" world"


def test_special_ids() -> None:
    tokenizer = make()
    assert tokenizer.special_ids == {256, 257, 258, 259}
    assert tokenizer.is_special(EOS_ID)
    assert not tokenizer.is_special(97)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (BOS_ID, EOS_ID)


def test_a_model_without_template_refuses_chats() -> None:
    with pytest.raises(QuireError, match="no chat template") as failure:
        make(chat_template=None).encode_chat(MESSAGES)
    assert failure.value.field == "chat"


def test_p3_threads_share_a_tokenizer() -> None:
    tokenizer = make(PIECES, chat_template=CHAT_TEMPLATE)
    texts = ["Hello", "world " * 5000, "😀" * 300, " "] * 16

    def work(text: str) -> tuple[list[int], list[int], str]:
        ids = tokenizer.encode(text)
        return ids, tokenizer.encode_chat([{"role": "user", "content": text[:50]}]), tokenizer.decode(ids)

    serial = [work(text) for text in texts]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(work, texts)) == serial


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_decoders_that_are_not_understood_are_refused(decoder: dict[str, Any] | None) -> None:
    broken = json.dumps(BYTES.tokenizer | {"decoder": decoder})
    with pytest.raises(QuireError, match="decoder") as failure:
        ModelTokenizer(broken, {})
    assert failure.value.reason is Reason.UNSUPPORTED


@pytest.mark.parametrize("data", [b"", b"PK", b"PK\x05\x06" + bytes(18)])
def test_s1_other_bytes_are_no_bundle(data: bytes) -> None:
    with pytest.raises(QuireError, match="not a tokenizer bundle") as failure:
        ModelTokenizer.from_bundle(data)
    assert failure.value.reason is Reason.PROTOCOL


def test_marks_show_to_whoever_reads_calls() -> None:
    """Where they are special tokens, which clients do not see otherwise; other special tokens stay hidden."""
    vocabulary = byte_level(["<|python_tag|>", "<think>"])
    for token_id, text in ((260, "<|python_tag|>"), (261, "<think>")):
        vocabulary.tokenizer["added_tokens"].append(special(token_id, text))
    tokenizer = ModelTokenizer(vocabulary.to_json(), {"eos_token": EOS})
    ids = [261, EOS_ID, ord("a"), 260]
    assert tokenizer.decode(ids) == "a"
    shown = IncrementalDetokenizer(tokenizer.showing_marks(), (), True)
    assert shown.push(ids) == "<think>a<|python_tag|>"
    every = IncrementalDetokenizer(tokenizer.showing_marks(), (), False)
    assert every.push(ids) == f"<think>{EOS}a<|python_tag|>"
    marked = tokenizer.showing_marks()
    assert [marked.is_special(token) for token in (*ids, 5)] == [False, True, False, False, False]
    assert [tokenizer.is_special(token) for token in ids] == [True, True, False, True]


def test_a_template_for_tools_alone() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    tokenizer = make(chat_template="plain", tool_template=HERMES)
    assert tokenizer.render_chat(MESSAGES) == "plain"
    assert "<tools>" in tokenizer.render_chat(MESSAGES, [tool])
    assert (tokenizer.facts.takes_tools, tokenizer.facts.style) == (True, Style.HERMES)
    assert not make(chat_template="plain").facts.takes_tools
