"""What --model may be, and what is said of everything else."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from huggingface_hub import constants

from services.common.errors import QuireError, Reason
from services.executor.models import source
from services.executor.models.catalogue import CatalogueEntry
from services.executor.models.source import resolve
from tests.fixtures.models import make_succ_model


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def cached_snapshot(tmp_path: Path, name: str = "org--name") -> Path:
    folder = tmp_path / "hub" / f"models--{name}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    return make_succ_model(folder / "snapshots" / ("0" * 40), {})


def failure_of(name: str) -> QuireError:
    with pytest.raises(QuireError) as failure:
        resolve(name)
    return failure.value


def test_a_folder_and_a_file(tmp_path: Path) -> None:
    folder = make_succ_model(tmp_path / "model", {})
    assert resolve(str(folder)) == folder
    (tmp_path / "m.gguf").write_bytes(b"GGUF and more")
    assert resolve(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"


def test_the_home_folder_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make_succ_model(tmp_path / "model", {})
    assert resolve("~/model") == tmp_path / "model"


def test_a_folder_that_is_no_model_names_its_gguf_files(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    error = failure_of(str(tmp_path))
    assert error.reason is Reason.MODEL_LOAD_FAILED
    assert "a.gguf" in error.message


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"<html>")
    assert failure_of(str(tmp_path / "m.gguf")).reason is Reason.MODEL_LOAD_FAILED


@pytest.mark.parametrize("name", ["nothing", "/no/such/folder", "missing.gguf", "./missing/model.gguf", "", "a/b/c"])
def test_names_of_nothing(name: str) -> None:
    error = failure_of(name)
    assert error.reason is Reason.MODEL_NOT_FOUND
    assert "smollm2" in error.message


def test_a_catalogue_name_wins_over_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetched(name: str, entry: CatalogueEntry, progress: source.Progress) -> Path:
        progress(f"downloading {name}", 1, 2)
        return tmp_path / "from the catalogue"

    monkeypatch.setattr(source, "fetch", fetched)
    monkeypatch.chdir(tmp_path)
    make_succ_model(tmp_path / "smollm2", {})
    seen: list[tuple[str, int, int]] = []
    assert resolve("smollm2", lambda *report: seen.append(report)) == tmp_path / "from the catalogue"
    assert seen == [("downloading smollm2", 1, 2)]
    assert resolve("smollm2") == tmp_path / "from the catalogue"
    assert resolve("./smollm2") == Path("smollm2")


def test_a_cached_hub_model_needs_no_network(tmp_path: Path) -> None:
    snapshot = cached_snapshot(tmp_path)
    assert resolve("org/name") == snapshot
    (snapshot / "model.Q4_0.gguf").write_bytes(b"GGUF")
    assert resolve("org/name:model.Q4_0.gguf") == snapshot / "model.Q4_0.gguf"


def test_a_hub_model_that_is_not_cached_says_so(tmp_path: Path) -> None:
    for name in ("org/name", "org/name:file.gguf"):
        error = failure_of(name)
        assert error.reason is Reason.MODEL_LOAD_FAILED
        assert "org/name" in error.message
        assert "cannot be reached" in error.message


def test_a_snapshot_with_missing_shards_is_not_taken_for_whole(tmp_path: Path) -> None:
    snapshot = cached_snapshot(tmp_path)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert not source._is_complete(snapshot)
    (snapshot / "model-2.safetensors").write_bytes(b"")
    assert source._is_complete(snapshot)


def test_a_hub_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the hub's own client and its retries, and nobody at its address."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    chatter = logging.getLogger("huggingface_hub")
    chatter.addHandler(listener)
    try:
        error = failure_of("org/name:file.gguf")
    finally:
        chatter.removeHandler(listener)
    assert error.reason is Reason.MODEL_LOAD_FAILED
    assert "\n" not in error.message
    assert said == ["the hub does not answer for org/name; trying again"]
