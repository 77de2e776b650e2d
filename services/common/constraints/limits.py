"""How large a rule of the output may be. Pure: looks at sizes only, so every service checks its own wire with it."""

from __future__ import annotations

from typing import Any

from quire.v1 import types_pb2
from services.common.errors import invalid

MAX_RULE_BYTES = 64 * 1024
"""Of a schema, a grammar, a regex or all choices. A schema of that size compiles in less than a second."""
MAX_NESTING = 64
"""Levels of JSON, and of brackets in a grammar."""
MAX_LISTED_CHOICES = 1024

_RULES = ", ".join(field.name for field in types_pb2.Constraint.DESCRIPTOR.fields)


def rule_path(constraint: types_pb2.Constraint) -> str:
    """The name of the field that holds the rule, as errors tell it."""
    return f"constraint.{constraint.WhichOneof('rule')}"


def check_constraint(constraint: types_pb2.Constraint) -> None:
    """Refuses a constraint without a rule, an empty one and one that is too large. Raises INVALID_FIELD."""
    kind, path = constraint.WhichOneof("rule"), rule_path(constraint)
    if kind is None:
        raise invalid("constraint", f"one of {_RULES} is required")
    if kind == "json_object":
        if not constraint.json_object:
            raise invalid(path, "must be true where it is set")
        return
    if kind == "choice":
        texts = constraint.choice.values
        if not 1 <= len(texts) <= MAX_LISTED_CHOICES:
            raise invalid(path, f"must list 1 to {MAX_LISTED_CHOICES} strings, not {len(texts)}")
        if not all(texts):
            raise invalid(path, "a string to choose must not be empty")
        size = sum(len(text.encode()) for text in texts)
    else:
        size = len(getattr(constraint, kind).encode())
        if not size:
            raise invalid(path, "must not be empty")
    if size > MAX_RULE_BYTES:
        raise invalid(path, f"has {size} bytes, {MAX_RULE_BYTES} are the limit")


def check_nesting(path: str, value: Any) -> None:
    """Refuses JSON that is nested too deeply for any of its readers. Raises INVALID_FIELD."""
    level = [value]
    for _ in range(MAX_NESTING):
        level = [inner for outer in level for inner in _children(outer)]
        if not level:
            return
    raise invalid(path, f"is nested deeper than {MAX_NESTING} levels")


def weight(constraint: types_pb2.Constraint | None) -> int:
    """How much of a message a rule takes, in token ids."""
    return 0 if constraint is None else constraint.ByteSize() // 3


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
