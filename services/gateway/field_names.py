"""From fields of the engine's input back to those that a client of another protocol wrote. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from services.common.errors import QuireError


def rename(path: str, names: Mapping[str, str]) -> str:
    """The client's name of the longest known beginning of `path`, with the rest kept."""
    path = path.removeprefix("input.")
    for cut in range(len(path), 0, -1):
        if (cut == len(path) or path[cut] in ".[") and path[:cut] in names:
            return names[path[:cut]] + path[cut:]
    return path


def renamed(error: QuireError, names: Mapping[str, str]) -> tuple[str, str]:
    """Field and message of a failure that names a field, both with the client's name of it."""
    field, message = rename(error.field, names), error.message
    if message.startswith(f"{error.field}:"):
        message = field + message[len(error.field) :]
    return field, message
