"""What a model's folder says of how it is to be sampled."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from quire.v1 import types_pb2
from services.executor.sampling_defaults import FILE, read_sampling


def read(folder: Path, **stated: Any) -> types_pb2.SamplingParams | None:
    (folder / FILE).write_text(json.dumps(stated))
    return read_sampling(folder)


def test_what_is_stated_is_offered(tmp_path: Path) -> None:
    found = read(tmp_path, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1, eos_token_id=[1, 2])
    assert found == types_pb2.SamplingParams(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1)
    assert read(tmp_path, min_p=0.05) == types_pb2.SamplingParams(min_p=0.05)
    assert read(tmp_path, temperature=0) == types_pb2.SamplingParams(temperature=0)


def test_nothing_is_stated(tmp_path: Path) -> None:
    assert read_sampling(tmp_path) is None
    assert read_sampling(tmp_path / "model.gguf") is None
    assert read(tmp_path, eos_token_id=2, temperature=None) is None


@pytest.mark.parametrize(
    "stated", [{"temperature": "warm"}, {"temperature": -1}, {"top_p": 2}, {"top_k": -7}, {"top_k": 0.5}]
)
def test_what_cannot_be_followed_is_not_offered(
    tmp_path: Path, stated: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "quire.executor"):
        assert read(tmp_path, **stated) is None
    (record,) = caplog.records
    assert next(iter(stated)) in record.__dict__["why"]
