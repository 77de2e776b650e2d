"""From EBNF as llama.cpp writes it ("root ::= ...") to Lark, which llguidance reads. Pure; linear in the text.

Rules that are not recursive become terminals: each is one regular expression then, and its text is matched exactly.
Between the parts of a recursive rule, terminals take as much text as they can, as in every Lark grammar.
"""

from __future__ import annotations

import json
import re
from collections import deque
from dataclasses import dataclass, field

from services.common.constraints.limits import MAX_NESTING
from services.common.errors import QuireError, invalid

_LARK = re.compile(r"^[ \t]*(?:%llguidance\b|start[ \t]*(?:\[[^\]\n]*\])?[ \t]*:(?!:=))", re.MULTILINE)
_TOKEN = re.compile(
    r"""(?P<blank>(?:\s|\#[^\n]*)+)
      | (?P<rule>[A-Za-z_][\w-]*)(?:\s|\#[^\n]*)*::=
      | (?P<name>[A-Za-z_][\w-]*)
      | "(?P<literal>(?:[^"\\\n]|\\.)*)"
      | \[(?P<negated>\^?)(?P<letters>(?:[^\]\\\n]|\\.)+)\]
      | (?P<repeat>[*+?]|\{\d{1,5}(?:,\d{0,5})?\})
      | (?P<mark>[().|])""",
    re.VERBOSE | re.ASCII,
)
_ESCAPED = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_LETTER = re.compile(r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)|.", re.DOTALL)
_ANYTHING = "/(?s:.)/"
_TOO_DEEP = f"has brackets nested deeper than {MAX_NESTING}"
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}


@dataclass(slots=True)
class _Rule:
    parts: list[str] = field(default_factory=list)  # in Lark, but for names of other rules
    names: dict[int, str] = field(default_factory=dict)  # index in parts -> rule


def is_lark(text: str) -> bool:
    """Whether a grammar is in Lark already."""
    return "::=" not in text and _LARK.search(text) is not None


def ebnf_to_lark(path: str, text: str) -> str:
    """The same grammar in Lark, with the rule "root" as its start. Raises INVALID_FIELD with the line."""
    rules = _parse(path, text)
    if "root" not in rules:
        raise invalid(path, 'has no rule "root" (EBNF) and no rule "start" (Lark)')
    for rule in rules.values():
        for name in rule.names.values():
            if name not in rules:
                raise invalid(path, f"the rule {name[:40]!r} is not defined")
    terminals = _terminals(rules)
    lark_names = {}
    for number, name in enumerate(rules):
        plain = re.sub(r"\W", "_", name, flags=re.ASCII)
        lark_names[name] = f"T_{plain.upper()}_{number}" if name in terminals else f"r_{plain.lower()}_{number}"
    lines = [f"start: {lark_names['root']}"]
    for name, rule in rules.items():
        for index, other in rule.names.items():
            rule.parts[index] = lark_names[other]
        lines.append(f"{lark_names[name]}: {' '.join(rule.parts)}")
    return "\n".join(lines)


def _terminals(rules: dict[str, _Rule]) -> set[str]:
    """Rules that neither are recursive nor refer to any that are."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    waits: dict[str, int] = {}
    for name, rule in rules.items():
        others = set(rule.names.values())
        waits[name] = len(others)
        for other in others:
            users[other].append(name)
    ready = deque(name for name, count in waits.items() if not count)
    found = set()
    while ready:
        name = ready.popleft()
        found.add(name)
        for user in users[name]:
            waits[user] -= 1
            if not waits[user]:
                ready.append(user)
    return found


def _parse(path: str, text: str) -> dict[str, _Rule]:
    rules: dict[str, _Rule] = {}
    rule, depth, at = None, 0, 0
    repeatable = False  # whether the last part may be repeated; else it is none, or repeated already
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise _wrong(path, text, at, f"cannot be read at {text[at : at + 20]!r}")
        start, at, kind = at, token.end(), token.lastgroup
        if kind == "blank":
            continue
        if kind == "rule":
            if depth or token["rule"] in rules:
                raise _wrong(path, text, start, "begins a rule inside brackets" if depth else "defines a rule again")
            _close(rule)
            rule, repeatable = rules.setdefault(token["rule"], _Rule()), False
            continue
        if rule is None:
            raise _wrong(path, text, start, "must begin with a rule, such as root ::=")
        if kind == "repeat":
            if not repeatable:
                raise _wrong(path, text, start, "repeats nothing, or what is repeated already")
            rule.parts.append(token["repeat"])
            repeatable = False
            continue
        mark = token["mark"]
        depth += {"(": 1, ")": -1}.get(mark, 0)
        if not 0 <= depth <= MAX_NESTING:
            raise _wrong(path, text, start, "closes a bracket that is not open" if depth < 0 else _TOO_DEEP)
        if mark in ("|", ")"):
            _close(rule)
        if kind == "name":
            rule.names[len(rule.parts)] = token["name"]
        rule.parts.append(_lark_of(path, text, token))
        repeatable = mark not in ("(", "|")
    if depth:
        raise invalid(path, "has a bracket that is not closed")
    _close(rule)
    return rules


def _close(rule: _Rule | None) -> None:
    """Ends an alternative: one of nothing is written out."""
    if rule is not None and (not rule.parts or rule.parts[-1] in ("(", "|")):
        rule.parts.append('""')


def _lark_of(path: str, text: str, token: re.Match[str]) -> str:
    try:
        if token["literal"] is not None:
            return json.dumps(_ESCAPED.sub(lambda found: chr(_code(found[0])), token["literal"]), ensure_ascii=False)
        if token["letters"] is not None:
            return f"/[{token['negated']}{_letters(token['letters'])}]/"
    except ValueError:
        raise _wrong(path, text, token.start(), "names a character that does not exist") from None
    return _ANYTHING if token["mark"] == "." else token[0]


def _letters(text: str) -> str:
    """The inside of a character class, every letter by its number but for the dashes of ranges."""
    letters = [one[0] for one in _LETTER.finditer(text)]
    return "".join(
        "-" if one == "-" and 0 < at < len(letters) - 1 else f"\\x{{{_code(one):X}}}" for at, one in enumerate(letters)
    )


def _code(letter: str) -> int:
    """The code point of a letter or an escape. Raises ValueError where there is none."""
    found = _ESCAPED.fullmatch(letter)
    if found is None:
        return ord(letter)
    digits = found[1] or found[2] or found[3]
    code = int(digits, 16) if digits else ord(_CONTROLS.get(found[4], found[4]))
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError
    return code


def _wrong(path: str, text: str, at: int, what: str) -> QuireError:
    return invalid(path, f"line {text.count(chr(10), 0, at) + 1} {what}")
