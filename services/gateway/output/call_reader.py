"""What all styles of calls share: numbering calls, and giving back what turned out to be none."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from services.gateway.output.call_object import CallObject
from services.gateway.output.parts import CallArguments, CallBegin, CallFault, Part, Text


class CallReader:
    """Reads calls, one after the other, each from where a style says that one may begin."""

    def __init__(self, tools: Collection[str]) -> None:
        self._tools = tools
        self._index = 0
        self._call: CallObject | None = None
        self._written = ""  # of the call, with what was ahead of it
        self.whole = False
        """Whether the last call was one."""

    @property
    def reading(self) -> bool:
        return self._call is not None

    def begin(self, ahead: str) -> None:
        """A call may follow. `ahead` was held back: it belongs to the call, or is text where none comes."""
        self._call, self._written, self.whole = CallObject(self._tools), ahead, False

    def push(self, text: str) -> tuple[str, list[Part]]:
        """Reads on. Returns what it did not read: `reading` is over behind a call, and where there is none."""
        call = self._call
        assert call is not None, "no call was begun"
        begun = call.begun
        end = call.push(text, 0)
        self._written += text[:end]
        parts: list[Part] = []
        if call.begun:
            if not begun:
                parts.append(CallBegin(self._index, call.name or ""))
            if arguments := call.take():
                parts.append(CallArguments(self._index, arguments))
        if call.failed:
            parts.extend(self._give_up(call))
        elif call.done:
            self._index += 1
            self._call, self._written, self.whole = None, "", True
        return text[end:], parts

    def finish(self) -> list[Part]:
        """The output ended: a call that is not whole is none."""
        return [] if self._call is None else list(self._give_up(self._call))

    def _give_up(self, call: CallObject) -> Iterator[Part]:
        if call.begun:
            yield CallFault(self._index, self._written)
            self._index += 1
        elif self._written:
            yield Text(self._written)
        self._call, self._written = None, ""
