"""Tokenizer files that were damaged or made to harm: a bundle, or a message."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import QuireError, Reason
from services.executor.models.gguf_tokenizer import tokenizer_from_gguf
from services.executor.models.sentencepiece_file import read_sentencepiece
from services.executor.models.tokenizer_bundle import build_bundle
from tests.fixtures.damage import damage, marker_of
from tests.fixtures.models import make_rand_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = make_rand_model(tmp_path / "m", layers=1, hidden=32, heads=2, kv_heads=1, intermediate=32)
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        (made / name).unlink()
    return made


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refused(folder: Path, message: str) -> None:
    with pytest.raises(QuireError, match=message) as error:
        build_bundle(folder)
    assert error.value.reason is Reason.MODEL_LOAD_FAILED


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("tokenizer.json", {"post_processor": {"type": "Sequence"}}),
        ("tokenizer.json", {"post_processor": ["x"]}),
        ("tokenizer.json", {"model": {"type": "BPE", "vocab": {"\ud800": 0}, "merges": []}}),
        ("tokenizer_config.json", {"bos_token": "\ud800"}),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}),
        ("tokenizer_config.json", {"chat_template": ["x"]}),
    ],
    ids=str,
)
def test_values_of_other_types(folder: Path, file: str, values: dict[str, Any]) -> None:
    edit(folder / file, **values)
    refused(folder, "m: the tokenizer cannot be used: ")


def test_templates_that_are_no_text(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe\x00")
    refused(folder, "cannot be used: UnicodeDecodeError")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_pipes_and_texts_without_end(folder: Path, name: str) -> None:
    os.truncate(folder / name, 1 << 40)
    refused(folder, "has more than")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    refused(folder, "no plain file")


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": ["a" * 2000, "a"], "scores": [0.0, 0.0]},
        {"tokens": [1, 2], "scores": [0.0, 0.0]},
        {"scores": ["x", "y"]},
        {"token_type": 3},
        {"bos_token_id": "x"},
    ],
    ids=lambda value: str(value)[:50],
)
def test_vocabularies_of_other_types(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, Any]) -> None:
    keys = {"model": "llama", "tokens": ["a", "b"], "scores": [0.0, 0.0]} | changes
    fields = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    monkeypatch.setattr("services.executor.models.tokenizer_bundle._from_folder", lambda _: tokenizer_from_gguf(fields))
    refused(tmp_path, "cannot be used|a token of 2000 letters|more or fewer types")


def test_sentencepiece_numbers_end(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"\x80" * 100_000 + b"\x01")
    with pytest.raises(QuireError, match="a number of more than 64 bits"):
        read_sentencepiece(path)


@pytest.mark.parametrize("case", range(60))
def test_damaged_files_make_a_bundle_or_a_message(folder: Path, case: int) -> None:
    damage(folder, random.Random(f"tokenizer {case}"))
    found: QuireError | None = None
    try:
        build_bundle(folder)
    except QuireError as error:
        found = error
    assert found is None or found.reason is Reason.MODEL_LOAD_FAILED
    assert not marker_of(folder).exists()
    shutil.rmtree(folder)
