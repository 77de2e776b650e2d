"""Bundles of folders: from tokenizer.json, from tokenizer.model, and what is refused."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import QuireError, Reason
from services.executor.models.tokenizer_bundle import build_bundle
from services.gateway.tokenizer import ModelTokenizer
from tests.fixtures.models import make_succ_model
from tests.fixtures.vocabularies import byte_level
from tests.unit.executor.test_gguf_tokenizer import GOLDENS


def config_of(bundle: bytes) -> dict[str, Any]:
    with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
        content: dict[str, Any] = json.loads(archive.read("tokenizer_config.json"))
    return content


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_becomes_the_same_bundle_every_time(tmp_path: Path) -> None:
    bundle = build_bundle(make_succ_model(tmp_path / "a", {}))
    assert bundle == build_bundle(make_succ_model(tmp_path / "b", {}))
    assert ModelTokenizer.from_bundle(bundle).fingerprint == hashlib.sha256(bundle).hexdigest()
    config = config_of(bundle)
    assert config["add_bos"] is True
    assert config["bos_token"] == "<|bos|>"
    assert "im_start" in config["chat_template"]


def test_add_bos_follows_the_post_processor_unless_the_config_says(tmp_path: Path) -> None:
    path = make_succ_model(tmp_path, {}, vocabulary=byte_level(add_bos=False))
    assert config_of(build_bundle(path))["add_bos"] is False
    change_json(path / "tokenizer_config.json", add_bos_token=True)
    assert config_of(build_bundle(path))["add_bos"] is True


def test_special_strings_may_be_objects_and_templates_named_or_files(tmp_path: Path) -> None:
    path = make_succ_model(tmp_path, {})
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    change_json(path / "tokenizer_config.json", eos_token={"content": "<|eos|>"}, chat_template=named)
    config = config_of(build_bundle(path))
    assert (config["eos_token"], config["chat_template"]) == ("<|eos|>", "d")
    assert config["tool_template"] == "t"
    (path / "chat_template.jinja").write_text("from a file")
    assert "tool_template" not in config_of(build_bundle(path))
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("for tools")
    assert config_of(build_bundle(path))["tool_template"] == "for tools"
    assert config_of(build_bundle(path))["chat_template"] == "from a file"


def test_a_model_without_template_says_null(tmp_path: Path) -> None:
    assert config_of(build_bundle(make_succ_model(tmp_path, {}, chat_template=None)))["chat_template"] is None


def test_truncation_and_padding_of_the_file_are_dropped(tmp_path: Path) -> None:
    path = make_succ_model(tmp_path, {})
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    change_json(path / "tokenizer.json", truncation=cut)
    assert len(ModelTokenizer.from_bundle(build_bundle(path)).encode("a long text")) == 1 + len("a long text")


def varint(value: int) -> bytes:
    low = value & 0x7F
    return bytes([low | 0x80]) + varint(value >> 7) if value > 0x7F else bytes([low])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def sentencepiece_file(model_type: int = 2, charsmap: bytes = b"") -> bytes:
    vocabulary = GOLDENS["vocabularies"]["llama"]
    pieces = zip(vocabulary["tokens"], vocabulary["scores"], vocabulary["token_type"], strict=True)
    out = b"".join(
        field(1, field(1, token.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score) + field(3, kind))
        for token, score, kind in pieces
    )
    return out + field(2, field(3, model_type)) + field(3, field(2, charsmap) + field(3, 1))


def test_a_sentencepiece_model_gives_llama_cpp_ids(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file())
    tokenizer = ModelTokenizer.from_bundle(build_bundle(tmp_path))
    for text, expected in zip(GOLDENS["texts"], GOLDENS["ids"]["spm"], strict=True):
        assert tokenizer.encode(text, add_bos=False) == expected
    assert tokenizer.adds_bos is False  # the folder names no bos_token
    special = {"bos_token": "<s>", "added_tokens_decoder": {"9": {"content": "<0x06>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
    with_config = ModelTokenizer.from_bundle(build_bundle(tmp_path))
    assert with_config.encode("<s>hi")[:1] == with_config.encode("hi")[:1] == [1]
    assert with_config.is_special(9)


@pytest.mark.parametrize(
    "content", [sentencepiece_file(model_type=1), sentencepiece_file(charsmap=b"x"), sentencepiece_file()[:-3], b""]
)
def test_other_sentencepiece_models_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(QuireError, match=r"tokenizer\.model") as failure:
        build_bundle(tmp_path)
    assert failure.value.reason is Reason.MODEL_LOAD_FAILED


def test_a_folder_without_or_with_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QuireError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        build_bundle(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(QuireError, match=r"tokenizer\.json"):
        build_bundle(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Nothing"}}')
    with pytest.raises(QuireError, match="cannot be used"):
        build_bundle(tmp_path)
