"""Where a model comes from: a folder, a .gguf file, a catalogue name, or a hub id `org/name` or `org/name:file.gguf`.

A catalogue name wins over a folder of the same name; write ./name for the folder.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.common.errors import QuireError, Reason
from services.executor.models.catalogue import CATALOGUE, Progress, fetch

HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<file>[^:]+))?")
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
HUB_IGNORED = ("original/*", "consolidated*", "*/*")


def resolve(source: str, progress: Progress | None = None) -> Path:
    """Local path of the model, a folder or a .gguf file; downloads what is not there yet.

    Without `progress` a bar is shown where standard error is a terminal. Raises MODEL_NOT_FOUND where nothing has
    this name, MODEL_LOAD_FAILED where it cannot be fetched or is no model.
    """
    if source in CATALOGUE:
        if progress is not None:
            return fetch(source, CATALOGUE[source], progress)
        with _terminal_bar() as bar:
            return fetch(source, CATALOGUE[source], bar)
    path = Path(source).expanduser()
    if source and path.exists():
        return _check_local(path)
    match = HUB_ID.fullmatch(source)
    if match and not (source.endswith(".gguf") and match["file"] is None):
        return _from_hub(match["repo"], match["file"])
    raise QuireError(
        Reason.MODEL_NOT_FOUND,
        f"no model {source!r}: not a folder or .gguf file, not a hub id (org/name), "
        f"and not in the catalogue ({', '.join(sorted(CATALOGUE))})",
    )


def default_name(source: str) -> str:
    """What a model is called where nobody named it: the last part of its source, without `.gguf`."""
    # A hub id ("owner/name") and a path both end in what people call the model.
    return source.rstrip("/").rpartition("/")[2].removesuffix(".gguf")


def _check_local(path: Path) -> Path:
    if path.is_dir():
        if not (path / "config.json").is_file():
            files = sorted(file.name for file in path.glob("*.gguf"))
            hint = f"; name one of its files: {', '.join(files)}" if files else ""
            raise QuireError(Reason.MODEL_LOAD_FAILED, f"{path} is no model folder: it has no config.json{hint}")
        return path
    if not path.is_file():  # a pipe, say, which would be read for ever
        raise QuireError(Reason.MODEL_LOAD_FAILED, f"{path} is neither a folder nor a file")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise QuireError(Reason.MODEL_LOAD_FAILED, f"{path} is not a GGUF file")
    return path


def fetch_config(repo: str) -> Path:
    """config.json of a hub model, and beside it the index of its weights where there is one; no weights.

    Raises MODEL_NOT_FOUND, or MODEL_LOAD_FAILED where the hub cannot be reached.
    """
    from huggingface_hub import errors, hf_hub_download

    with _hub_errors(repo):
        with contextlib.suppress(errors.EntryNotFoundError):
            hf_hub_download(repo, "model.safetensors.index.json")
        return Path(hf_hub_download(repo, "config.json"))


def _from_hub(repo: str, file: str | None) -> Path:
    """A cached copy where it is complete, else a download. HF_HUB_OFFLINE and the hub's other settings hold."""
    from huggingface_hub import errors, hf_hub_download, snapshot_download, try_to_load_from_cache

    with _hub_errors(repo):
        if file is not None:
            found = try_to_load_from_cache(repo, file)
            return _check_local(Path(found if isinstance(found, str) else hf_hub_download(repo, file)))
        try:
            cached = Path(snapshot_download(repo, local_files_only=True))
        except errors.LocalEntryNotFoundError:
            cached = None
        if cached is not None and _is_complete(cached):
            return cached
        return _check_local(
            Path(snapshot_download(repo, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_IGNORED)))
        )


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Failures of the hub as errors of ours; of its client's word on each attempt, one line."""
    from huggingface_hub import errors

    attempts, one_line = logging.getLogger("huggingface_hub.utils._http"), _OneLine(repo)
    attempts.addFilter(one_line)
    try:
        yield
    except (errors.RepositoryNotFoundError, errors.RemoteEntryNotFoundError, errors.HFValidationError) as error:
        raise QuireError(Reason.MODEL_NOT_FOUND, f"no model {repo} on the hub: {_first_line(error)}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise QuireError(
            Reason.MODEL_LOAD_FAILED, f"model {repo} is not in the hub's cache and the hub cannot be reached"
        ) from error
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]  # of whichever library its client uses
        raise QuireError(Reason.MODEL_LOAD_FAILED, f"model {repo}: {_first_line(error)}") from error
    finally:
        attempts.removeFilter(one_line)


class _OneLine(logging.Filter):
    """Says once that the hub does not answer, instead of all that is logged."""

    def __init__(self, repo: str) -> None:
        super().__init__()
        self._repo, self._said = repo, False

    def filter(self, record: logging.LogRecord) -> bool:
        if self._said:
            return False
        self._said = True
        record.msg, record.args = f"the hub does not answer for {self._repo}; trying again", ()
        return True


def _is_complete(folder: Path) -> bool:
    """Whether a snapshot has all its weights and a tokenizer; an interrupted download leaves a part."""
    if not (folder / "config.json").is_file():
        return False
    from services.executor.models.weight_index import INDEX, shard_names

    index = folder / INDEX
    weights = shard_names(index) if index.is_file() else ["model.safetensors"]
    tokenizers = ("tokenizer.json", "tokenizer.model")
    return all((folder / name).is_file() for name in weights) and any((folder / name).is_file() for name in tokenizers)


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def _terminal_bar() -> Iterator[Progress]:
    """A progress bar that appears with the first report, one per kind of work."""
    bars: dict[str, Any] = {}

    def report(what: str, done: int, total: int) -> None:
        from tqdm import tqdm  # not needed where all is in the cache

        if what not in bars:
            for bar in bars.values():
                bar.close()
            bars[what] = tqdm(desc=what, total=total, unit="B", unit_scale=True, unit_divisor=1000, disable=None)
        bars[what].update(done - bars[what].n)

    try:
        yield report
    finally:
        for bar in bars.values():
            bar.close()
