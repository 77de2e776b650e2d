"""One log of all services: each line with its service's name, to the run's file and, where wanted, to a terminal."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

_COLORS = (36, 33, 32, 35, 34, 31)
ROTATE_BYTES = 64 * 1024 * 1024
"""The file is begun anew past this size; the part before stays as FILE.1."""


class MergedLog:
    """Owns the run's log file. Keeps each service's last lines for the message when it is given up."""

    def __init__(self, path: Path, names: list[str], terminal: TextIO | None) -> None:
        self._path, self._terminal = path, terminal
        self._file = path.open("a", buffering=1, encoding="utf-8", errors="replace")
        self._shown: Callable[[str], None] = self._show
        self._width = max(map(len, names))
        self._color = {name: _COLORS[index % len(_COLORS)] for index, name in enumerate(names)}
        self._recent = {name: deque[str](maxlen=8) for name in names}

    def line(self, name: str, text: str) -> None:
        """Adds one line of a service."""
        self._recent[name].append(text)
        label = f"{name:<{self._width}} | "
        self._file.write(f"{label}{text}\n")
        if self._file.tell() > ROTATE_BYTES:
            self._rotate()
        if self._terminal is not None:
            if self._terminal.isatty():
                label = f"\x1b[{self._color[name]}m{label}\x1b[0m"
            self._shown(f"{label}{text}\n")

    @contextmanager
    def hold_terminal(self) -> Iterator[None]:
        """Keeps lines off the terminal meanwhile, so that other text stays in one piece; they follow at the end."""
        held: list[str] = []
        shown, self._shown = self._shown, held.append
        try:
            yield
        finally:
            self._shown = shown
            for line in held:
                shown(line)

    def recent(self, name: str) -> list[str]:
        """The last lines of a service."""
        return list(self._recent[name])

    def close(self) -> None:
        self._file.close()

    def _show(self, line: str) -> None:
        assert self._terminal is not None
        self._terminal.write(line)
        self._terminal.flush()

    def _rotate(self) -> None:
        self._file.close()
        self._path.replace(self._path.with_name(self._path.name + ".1"))
        self._file = self._path.open("a", buffering=1, encoding="utf-8", errors="replace")
