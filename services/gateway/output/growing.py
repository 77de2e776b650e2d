"""What readers of growing text share: text that is held back, and states that each go on as far as they reach."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from services.gateway.output.marks import until_mark
from services.gateway.output.parts import Part


class GrowingText(ABC):
    """Half of a Parser: what became certain with the next text."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    @abstractmethod
    def _step(self, parts: list[Part]) -> bool:
        """Goes on as far as one state reaches. False where more text is needed."""

    def _until(self, mark: str, make: Callable[[str], Part], parts: list[Part]) -> str | None:
        """What follows the mark, or None where it is not there yet. What is ahead of it for certain becomes a part, the
        rest stays held."""
        certain, self._held, behind = until_mark(self._held, mark)
        if certain:
            parts.append(make(certain))
        return behind
