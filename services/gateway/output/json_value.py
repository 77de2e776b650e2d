"""Checks JSON while it is being written: where a value ends, and where it stops being JSON."""

from __future__ import annotations

import enum
import re

MAX_DEPTH = 64
"""Levels of a value; deeper ones are refused, as readers of JSON would."""

SPACES = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_WORDS = frozenset({"true", "false", "null"})
_LONGEST_WORD = 400  # characters of a number
_CLOSERS = {"{": "}", "[": "]"}


class _Expect(enum.Enum):
    VALUE = enum.auto()
    ITEM_OR_END = enum.auto()  # behind "["
    KEY_OR_END = enum.auto()  # behind "{"
    KEY = enum.auto()
    COLON = enum.auto()
    COMMA_OR_END = enum.auto()


class JsonValue:
    """One object, array or string. Give it text from where it begins; it says where it stopped reading."""

    def __init__(self) -> None:
        self.done = self.failed = False
        self._expect = _Expect.VALUE
        self._open: list[str] = []
        self._in_string = self._in_key = self._escaped = False
        self._digits = 0  # of \uXXXX that are still to come
        self._word = ""  # a number or a literal that may go on

    def push(self, text: str, at: int = 0) -> int:
        """Reads on from `at`. Returns the end of the value (`done`), the fault (`failed`), or the end of the text."""
        while at < len(text) and not self.done and not self.failed:
            if self._in_string:
                at = self._read_string(text, at)
            elif self._word or _WORD.match(text, at):
                at = self._read_word(text, at)
            elif text[at] in SPACES or self._mark(text[at]):
                at += 1
            else:
                self.failed = True
        return at

    def _read_string(self, text: str, at: int) -> int:
        letter = text[at]
        if self._digits:
            self._digits -= 1
            self.failed = letter not in "0123456789abcdefABCDEF"
        elif self._escaped:
            self._escaped = False
            self._digits = 4 if letter == "u" else 0
            self.failed = letter not in '"\\/bfnrtu'
        elif letter == "\\":
            self._escaped = True
        elif letter == '"':
            self._in_string = False
            if self._in_key:
                self._in_key, self._expect = False, _Expect.COLON
            else:
                self._end_value()
        elif plain := _PLAIN.match(text, at):
            return plain.end()
        else:
            self.failed = True
        return at if self.failed else at + 1

    def _read_word(self, text: str, at: int) -> int:
        """A number or literal; only what follows shows that it is over."""
        if not self._word and (not self._open or self._expect not in (_Expect.VALUE, _Expect.ITEM_OR_END)):
            self.failed = True
            return at
        found = _WORD.match(text, at)
        if found is not None:
            room = _LONGEST_WORD - len(self._word)
            self._word += found[0][:room]
            self.failed = len(found[0]) > room
            return at + min(len(found[0]), room)
        if self._word in _WORDS or _NUMBER.fullmatch(self._word):
            self._word = ""
            self._end_value()
        else:
            self.failed = True
        return at

    def _mark(self, letter: str) -> bool:
        """Whether a mark may stand here; takes it in."""
        expect = self._expect
        if letter == '"':
            if expect in (_Expect.KEY, _Expect.KEY_OR_END):
                self._in_string = self._in_key = True
                return True
            self._in_string = expect in (_Expect.VALUE, _Expect.ITEM_OR_END)
            return self._in_string
        if letter in "{[":
            if expect not in (_Expect.VALUE, _Expect.ITEM_OR_END) or len(self._open) == MAX_DEPTH:
                return False
            self._open.append(letter)
            self._expect = _Expect.KEY_OR_END if letter == "{" else _Expect.ITEM_OR_END
            return True
        if letter == ":":
            self._expect = _Expect.VALUE
            return expect is _Expect.COLON
        if letter == ",":
            self._expect = _Expect.KEY if self._open and self._open[-1] == "{" else _Expect.VALUE
            return expect is _Expect.COMMA_OR_END
        if letter in "}]" and self._open and _CLOSERS[self._open[-1]] == letter:
            opener = self._open.pop()
            empty = _Expect.KEY_OR_END if opener == "{" else _Expect.ITEM_OR_END
            self._end_value()
            return expect in (empty, _Expect.COMMA_OR_END)
        return False

    def _end_value(self) -> None:
        self._expect = _Expect.COMMA_OR_END
        self.done = not self._open
