"""Writes safetensors files, so that a name appears only with the whole file behind it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from services.executor.quant.parts import TYPES, Part

_ALIGNMENT = 8


def write_safetensors(path: Path, tensors: Mapping[str, Part]) -> None:
    """Replaces `path`. Wider numbers come first, so that all lie aligned."""
    ordered = sorted(tensors.items(), key=lambda item: -TYPES[item[1].format].itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # what transformers asks for
    end = 0
    for name, part in ordered:
        begin, end = end, end + part.data.nbytes
        header[name] = {"dtype": part.format, "shape": list(part.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    fresh = path.with_name(f"{path.name}.new")
    with fresh.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, part in ordered:
            file.write(part.data.data)
    os.replace(fresh, path)
