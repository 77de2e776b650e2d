"""What a model's own files say of it, taken for what it is: text that anybody may have written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.executor.models.weights import load_failed

MOST_JSON_BYTES = 64 << 20
_MOST_LEVELS = 32
MOST_NUMBER = 1 << 48  # of a size or an id: products of a few stay printable
_MOST_TOKEN_ID = (1 << 31) - 1


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object. MODEL_LOAD_FAILED for what is none, is no plain file, or is beyond all measure."""
    try:
        # A pipe or a device would be read for ever. Links are followed: the hub's cache consists of them.
        if not path.is_file():
            raise load_failed(f"{path} cannot be read: it is missing, or no plain file")
        if path.stat().st_size > MOST_JSON_BYTES:
            raise load_failed(f"{path} cannot be read: it has more than {MOST_JSON_BYTES >> 20} MiB")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise load_failed(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise load_failed(f"{path}: expected an object")
    _check_depth(path, value)
    return value


def _check_depth(path: Path, value: dict[str, Any]) -> None:
    """That whoever looks into it, or prints it, reaches the ground."""
    level: list[Any] = [value]
    for _ in range(_MOST_LEVELS):
        parts = (part.values() if isinstance(part, dict) else part for part in level)
        level = [inner for part in parts for inner in part if isinstance(inner, dict | list)]
        if not level:
            return
    raise load_failed(f"{path} cannot be read: it nests more than {_MOST_LEVELS} levels")


class Fields:
    """Named values that are checked when they are taken. Absent ones and null give the default, or are refused."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self._where, self._values = where, values

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def whole(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MOST_NUMBER:
            raise self._refused(key, "a whole number")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise self._refused(key, "a number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._refused(key, "text")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._refused(key, "true or false")
        return value

    def inner(self, key: str) -> Fields:
        """An object; one without fields where it is absent."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._refused(key, "an object")
        return Fields(f"{self._where}: {key}", value or {})

    def token_ids(self, key: str) -> list[int]:
        """A token id or a list of them; none where it is absent."""
        value = self._values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id <= _MOST_TOKEN_ID:
                raise self._refused(key, "token ids")
        return ids

    def _refused(self, key: str, wanted: str) -> Exception:
        value = self._values.get(key)
        return load_failed(f"{self._where}: {key} is {'missing' if value is None else repr(value)}, expected {wanted}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False
