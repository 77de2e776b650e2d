"""The folder that a quantized model is made in: finished layers, and how far the calibration text has come.

Until all is there, the parts lie in a subfolder with the request that they were made for. A run that was ended goes on
after the last finished layer, and gives the same bytes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.common.errors import invalid
from services.executor.models.safetensors_file import SafetensorsFile
from services.executor.quant.parts import Part
from services.executor.quantize.safetensors_out import write_safetensors

UNFINISHED = ".unfinished"
SHARD_BYTES = 5_000_000_000

_REQUEST, _TOKENS, _PROGRESS, _TOP = "request.json", "tokens.safetensors", "progress.safetensors", "top.safetensors"
_CHOICE = "choice.json"


@dataclass(frozen=True, slots=True)
class Progress:
    """What is left of an earlier run."""

    layers: int  # finished
    hidden: Tensor | None  # [S, T, H] fp32: the text before the next layer; None where the method needs none


class OutputFolder:
    """One folder, while a model is being made in it. All that writes raises INVALID_FIELD where the system refuses."""

    def __init__(self, path: Path, request: Mapping[str, Any]) -> None:
        """Begins, or goes on where the same request was begun. Raises INVALID_FIELD where something else is there."""
        self.path = path
        self._work = path / UNFINISHED
        stated = self._work / _REQUEST
        wanted = json.loads(json.dumps(request))
        with _writing(path):
            if stated.is_file():
                _check_same(path, _kept(path, stated), wanted)
            else:
                if path.exists() and (not path.is_dir() or any(entry.name != UNFINISHED for entry in path.iterdir())):
                    raise invalid("--out", f"{path} is not an empty folder")
                self._work.mkdir(parents=True, exist_ok=True)
                _write_text(stated, json.dumps(wanted, indent=1))

    def clear(self) -> None:
        """Takes away all that an earlier run has left."""
        with _writing(self.path):
            for entry in (*self.path.glob("model*.safetensors*"), *self._work.iterdir()):
                if entry.name != _REQUEST:
                    entry.unlink()

    def tokens(self) -> NDArray[np.int32] | None:
        """The calibration text [S, T], where an earlier run has kept it."""
        path = self._work / _TOKENS
        return _read(path, "tokens").astype(np.int32) if path.is_file() else None

    def keep_tokens(self, tokens: NDArray[np.int32]) -> None:
        with _writing(self.path):
            write_safetensors(self._work / _TOKENS, {"tokens": Part.of("I32", tokens)})

    def choice(self) -> Any:
        """What an earlier run kept by `keep_choice`, or None."""
        path = self._work / _CHOICE
        return _kept(self.path, path) if path.is_file() else None

    def keep_choice(self, choice: Any) -> None:
        """What was decided by measuring, as JSON holds it."""
        with _writing(self.path):
            _write_text(self._work / _CHOICE, json.dumps(choice))

    def progress(self) -> Progress:
        path = self._work / _PROGRESS
        if not path.is_file():
            return Progress(0, None)
        hidden = torch.from_numpy(_read(path, "hidden")) if "hidden" in SafetensorsFile(path).entries else None
        return Progress(int(_read(path, "layers")[0]), hidden)

    def keep_layer(self, index: int, tensors: Mapping[str, Part], hidden: Tensor | None) -> None:
        """A finished layer, and the text as it leaves it."""
        state = {"layers": Part.of("I32", np.array([index + 1]))}
        if hidden is not None:
            state["hidden"] = Part.of("F32", hidden.numpy())
        with _writing(self.path):
            write_safetensors(self._layer(index), tensors)
            write_safetensors(self._work / _PROGRESS, state)

    def keep_top(self, tensors: Mapping[str, Part]) -> None:
        """What belongs to no layer."""
        with _writing(self.path):
            write_safetensors(self._work / _TOP, tensors)

    def finish(self, layer_count: int, files: Mapping[str, bytes]) -> int:
        """Puts the parts together, with the model's other files; bytes of weights.

        `files` by name; the parts go away with the last of them in place.
        """
        with _writing(self.path):
            return self._put_together(layer_count, files)

    def _put_together(self, layer_count: int, files: Mapping[str, bytes]) -> int:
        parts = [SafetensorsFile(self._work / _TOP), *(SafetensorsFile(self._layer(i)) for i in range(layer_count))]
        shards = list(_shards(parts))
        places: dict[str, str] = {}
        total = 0
        for number, shard in enumerate(shards, 1):
            name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            write_safetensors(self.path / name, shard)
            places |= dict.fromkeys(shard, name)
            total += sum(part.data.nbytes for part in shard.values())
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            _write_text(self.path / "model.safetensors.index.json", json.dumps(index, indent=1))
        for name, content in files.items():
            (self.path / name).write_bytes(content)
        shutil.rmtree(self._work)
        return total

    def _layer(self, index: int) -> Path:
        return self._work / f"layer-{index:05}.safetensors"


def _shards(parts: list[SafetensorsFile]) -> Iterator[dict[str, Part]]:
    """All tensors, in as few files of SHARD_BYTES as their order allows; a tensor is never cut."""
    shard: dict[str, Part] = {}
    size = 0
    for file in parts:
        for name in file.entries:
            part = file.part(name)
            if shard and size + part.data.nbytes > SHARD_BYTES:
                yield shard
                shard, size = {}, 0
            shard[name] = part
            size += part.data.nbytes
    yield shard


def _kept(out: Path, path: Path) -> Any:
    """What an earlier run wrote as JSON. Raises INVALID_FIELD where it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise invalid(
            "--out", f"{out} holds a damaged unfinished model ({path.name}: {error}); delete it, or name another folder"
        ) from error


def _check_same(path: Path, stated: Any, wanted: Mapping[str, Any]) -> None:
    if not isinstance(stated, dict):
        stated = {}
    different = [key for key in sorted(stated.keys() | wanted.keys()) if stated.get(key) != wanted.get(key)]
    if different:
        said = "; ".join(f"{key} was {stated.get(key)}, not {wanted.get(key)}" for key in different)
        raise invalid(
            "--out", f"{path} holds an unfinished model of another request ({said}); delete it, or name another folder"
        )


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """What the system refuses, such as a full disk, is said of the flag."""
    try:
        yield
    except OSError as error:
        raise invalid("--out", f"{error.filename or path}: {error.strerror}") from error


def _read(path: Path, name: str) -> NDArray[Any]:
    return SafetensorsFile(path).part(name).array().copy()


def _write_text(path: Path, text: str) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)
