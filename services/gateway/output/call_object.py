"""One call as JSON: an object with a name and arguments, in any order, checked while it is being written."""

from __future__ import annotations

import enum
import json
from collections.abc import Collection

from services.gateway.output.json_value import SPACES, JsonValue

_ARGUMENTS = frozenset({"arguments", "parameters"})
_WORDS = frozenset({"name", "type", "id"})
"""Members that are strings. Models add a type or an id, without a meaning here."""
_LONGEST_WORD = 1024  # characters of a key or such a member as written


class _Expect(enum.Enum):
    OPEN = enum.auto()
    KEY_OR_END = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    MEMBER = enum.auto()
    COMMA_OR_END = enum.auto()


class CallObject:
    """It is a call once its name, which must be that of a tool, is known and its arguments, an object, have begun."""

    def __init__(self, tools: Collection[str]) -> None:
        self._tools = tools
        self.name: str | None = None
        self.done = self.failed = False
        self._expect = _Expect.OPEN
        self._key: str | None = None  # of the member that is read
        self._seen: set[str] = set()
        self._word: JsonValue | None = None  # a key, or a member that is a string, while it is read
        self._word_text = ""
        self._arguments: JsonValue | None = None  # while they are read
        self._began = False
        self._pending: list[str] = []  # of the arguments: not taken yet

    @property
    def begun(self) -> bool:
        """Whether this is a call as far as can be told."""
        return self.name is not None and self._began

    def take(self) -> str:
        """More of the arguments."""
        text = "".join(self._pending)
        self._pending.clear()
        return text

    def push(self, text: str, at: int) -> int:
        """Reads on from `at`. Returns the end of the call (`done`), the fault (`failed`), or the end of the text."""
        while at < len(text) and not self.done and not self.failed:
            if self._word is not None:
                at = self._read_word(self._word, text, at)
            elif self._arguments is not None:
                at = self._read_arguments(self._arguments, text, at)
            elif text[at] in SPACES:
                at += 1
            elif not self._mark(text[at]):
                self.failed = True
            elif self._word is None and self._arguments is None:  # else the value begins here
                at += 1
        return at

    def _mark(self, letter: str) -> bool:
        """Whether this may stand here; takes it in."""
        expect = self._expect
        if expect in (_Expect.KEY, _Expect.KEY_OR_END) and letter == '"':
            self._key, self._word = None, JsonValue()
            return True
        if expect is _Expect.MEMBER:
            return self._begin_member(letter)
        if letter == "}" and expect in (_Expect.KEY_OR_END, _Expect.COMMA_OR_END):
            return self._end()
        marks = {_Expect.OPEN: "{", _Expect.COLON: ":", _Expect.COMMA_OR_END: ","}
        following = {_Expect.OPEN: _Expect.KEY_OR_END, _Expect.COLON: _Expect.MEMBER, _Expect.COMMA_OR_END: _Expect.KEY}
        if marks.get(expect) != letter:
            return False
        self._expect = following[expect]
        return True

    def _begin_member(self, letter: str) -> bool:
        if self._key in _ARGUMENTS and letter == "{":
            self._arguments, self._began = JsonValue(), True
            return True
        if self._key in _WORDS and letter == '"':
            self._word = JsonValue()
            return True
        return False

    def _read_word(self, word: JsonValue, text: str, at: int) -> int:
        room = _LONGEST_WORD - len(self._word_text)
        end = word.push(text[: at + room], at)
        self._word_text += text[at:end]
        if word.failed or (not word.done and len(self._word_text) >= _LONGEST_WORD):
            self.failed = True
        elif word.done:
            read: str = json.loads(self._word_text)
            self._word, self._word_text = None, ""
            self.failed = not self._take_word(read)
        return end

    def _take_word(self, read: str) -> bool:
        if self._key is None:
            self._key, self._expect = read, _Expect.COLON
            kind = "arguments" if read in _ARGUMENTS else read
            known = kind not in self._seen and (kind == "arguments" or read in _WORDS)
            self._seen.add(kind)
            return known
        self._expect = _Expect.COMMA_OR_END
        if self._key == "name":
            if read not in self._tools:
                return False
            self.name = read
        return True

    def _read_arguments(self, arguments: JsonValue, text: str, at: int) -> int:
        end = arguments.push(text, at)
        self._pending.append(text[at:end])
        if arguments.failed:
            self.failed = True
        elif arguments.done:
            self._arguments, self._expect = None, _Expect.COMMA_OR_END
        return end

    def _end(self) -> bool:
        """Without arguments it is a call without any."""
        if self.name is None:
            return False
        if not self._began:
            self._began = True
            self._pending.append("{}")
        self.done = True
        return True
