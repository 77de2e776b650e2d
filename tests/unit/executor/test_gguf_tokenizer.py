"""Tokenizers of GGUF files give llama.cpp's ids. The goldens come from make_tokenizer_goldens.py beside this file."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import QuireError, Reason
from services.executor.models.catalogue import CATALOGUE, cache_folder
from services.executor.models.gguf_tokenizer import tokenizer_from_gguf
from services.executor.models.pre_tokenizers import find_pre_tokenizer
from services.executor.models.tokenizer_bundle import build_bundle
from services.gateway.tokenizer import ModelTokenizer

GOLDENS = json.loads(Path(__file__).with_name("tokenizer_goldens.json").read_text())
# SmolLM2's ids of wikitext-2's test split as llama.cpp gives them: how many, and the SHA-256 of them as int32.
WIKITEXT = (312144, "6ecb49cc3609ae7d45af51ecf05d3413f7671c6005fb9b75420854f1834e5ad8")


def metadata_of(run: str, **changes: Any) -> dict[str, Any]:
    keys = GOLDENS["vocabularies"][GOLDENS["runs"][run]["model"]] | GOLDENS["runs"][run] | changes
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def tokenizer_of(metadata: dict[str, Any]) -> ModelTokenizer:
    tokenizer, config = tokenizer_from_gguf(metadata)
    return ModelTokenizer(json.dumps(tokenizer), config)


@pytest.mark.parametrize("run", GOLDENS["runs"])
def test_ids_equal_those_of_llama_cpp(run: str) -> None:
    tokenizer = tokenizer_of(metadata_of(run))
    for text, expected in zip(GOLDENS["texts"], GOLDENS["ids"][run], strict=True):
        assert tokenizer.encode(text, add_bos=False) == expected, repr(text)


@pytest.mark.parametrize("run", ["smollm", "qwen2", "spm", "spm-no-prefix"])
def test_text_survives_a_round_trip(run: str) -> None:
    tokenizer = tokenizer_of(metadata_of(run))
    for text, ids in zip(GOLDENS["texts"], GOLDENS["ids"][run], strict=True):
        if "<" not in text and "\n\n" not in text:  # what follows such tokens gets a space in front
            assert tokenizer.decode(ids, skip_special=False) == text


def test_wikitext_ids_equal_those_of_llama_cpp() -> None:
    text, model = os.environ.get("QUIRE_WIKITEXT"), cache_folder() / CATALOGUE["smollm2"].file_name
    if text is None or not model.is_file():
        pytest.skip("needs QUIRE_WIKITEXT (wikitext-2's test.txt) and the default model in the cache")
    tokenizer = ModelTokenizer.from_bundle(build_bundle(model))
    ids = tokenizer.encode(Path(text).read_bytes().decode())
    assert (len(ids), hashlib.sha256(struct.pack(f"<{len(ids)}i", *ids)).hexdigest()) == WIKITEXT
    assert tokenizer.decode(ids) == Path(text).read_bytes().decode()


def test_flags_and_special_tokens_are_read() -> None:
    metadata = metadata_of("qwen2", bos_token_id=1, eos_token_id=2) | {"tokenizer.chat_template": "{{ messages }}"}
    _, config = tokenizer_from_gguf(metadata)
    assert config == {
        "chat_template": "{{ messages }}",
        "add_bos": False,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
    }
    assert tokenizer_from_gguf(metadata | {"tokenizer.ggml.add_bos_token": True})[1]["add_bos"]


def test_defaults_that_depend_on_the_kind_of_vocabulary() -> None:
    assert tokenizer_from_gguf(metadata_of("llama-bpe"))[1]["add_bos"]
    config = tokenizer_from_gguf(metadata_of("spm"))[1]
    assert (config["add_bos"], config["bos_token"], config["eos_token"]) == (True, "<s>", "</s>")
    tokenizer = tokenizer_of(metadata_of("spm"))
    assert tokenizer.special_ids >= {0, 1, 2}
    assert not tokenizer.is_special(tokenizer.encode("\n\n", add_bos=False)[0])  # user-defined, so plain text


def test_an_end_of_turn_marked_as_normal_is_special_all_the_same() -> None:
    types = list(GOLDENS["vocabularies"]["gpt2"]["token_type"])
    types[2] = 1
    tokenizer = tokenizer_of(metadata_of("smollm", token_type=types))
    assert tokenizer.encode("hi<|im_end|>", add_bos=False)[-1] == 2
    assert tokenizer.is_special(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "'t5'"),
        ({"pre": "nobody-knows"}, "'nobody-knows'"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "twice"),
        ({"token_type": [1]}, "types"),
        ({"model": "llama"}, "score"),
    ],
)
def test_vocabularies_that_cannot_be_used_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(QuireError, match=message) as failure:
        tokenizer_from_gguf(metadata_of("smollm", **changes))
    assert failure.value.reason is Reason.MODEL_LOAD_FAILED


def test_a_file_without_vocabulary_is_refused() -> None:
    with pytest.raises(QuireError, match="no vocabulary"):
        tokenizer_from_gguf({"general.architecture": "llama"})


def test_a_file_without_scheme_uses_the_default(caplog: pytest.LogCaptureFixture) -> None:
    metadata = metadata_of("default")
    del metadata["tokenizer.ggml.pre"]
    with_default = tokenizer_of(metadata)
    assert "does not say how to split" in caplog.text
    assert with_default.encode(GOLDENS["texts"][4], add_bos=False) == GOLDENS["ids"]["default"][4]
    assert find_pre_tokenizer("default").patterns
