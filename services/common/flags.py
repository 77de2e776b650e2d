"""The parser of all commands: what is wrong is one line, with what was probably meant."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable
from typing import Any, NoReturn

_TYPE_NAME = re.compile(r"invalid \w+ value: ")  # of a function of ours, which tells nobody anything


class FlagParser(argparse.ArgumentParser):
    """Takes flags by their full names alone and prints no usage where one is wrong; the line tells where to find it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        said = _TYPE_NAME.sub("invalid value: ", message.removeprefix("argument "))
        self.exit(2, f"{self.prog}: {said}; see `{self.prog} --help`\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As its base does, but nothing may be left over: of several parsers, this one knows what could be meant."""
        known, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(unknown(rest, self._option_string_actions))
        return known, rest


def unknown(rest: list[str], flags: Iterable[str]) -> str:
    """What is wrong with arguments that nobody takes; a value after an unknown flag is not worth naming."""
    names = [argument.partition("=")[0] for argument in rest if argument.startswith("-")]
    if names:
        return f"no such flag: {names[0]}{meant(names[0], flags)}"
    return f"unexpected argument: {rest[0]}"


def meant(given: str, known: Iterable[str]) -> str:
    """The known name that is like `given`, as the end of a message; empty where none is."""
    names = list(known)
    begun = [name for name in names if name.startswith(given)]
    near = begun if len(begun) == 1 else difflib.get_close_matches(given, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""
