"""The index of a checkpoint whose weights lie in several files."""

from __future__ import annotations

from pathlib import Path

from services.executor.models.fields import read_object
from services.executor.models.weights import load_failed

INDEX = "model.safetensors.index.json"
_MOST_BYTES = 255
"""Of a file's name."""


def shard_names(index: Path) -> list[str]:
    """The files it names, sorted, all in its own folder. MODEL_LOAD_FAILED where it is no index."""
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise load_failed(f"{index}: no index of weights: weight_map names no file for each tensor")
    names = sorted(set(places.values()))
    for name in names:
        if name in ("", ".", "..") or "\0" in name or len(name.encode(errors="replace")) > _MOST_BYTES:
            raise load_failed(f"{index}: shard {name[:_MOST_BYTES]!r} is no name of a file")
        if Path(name).name != name or "\\" in name:
            raise load_failed(f"{index}: shard {name!r} lies outside the folder")
    return names
