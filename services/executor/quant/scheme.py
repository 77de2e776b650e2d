"""What every scheme offers, and how labels are read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from services.executor.models.weights import QuantizedTensor, load_failed
from services.executor.quant.parts import StoredLayer

Word = TypeVar("Word", bound=str)
Label = Mapping[str, Any]
"""A `quantization_config`, or a part of one."""

_MOST_LETTERS = 1000
"""Of a pattern."""
_MOST_REPEATS = 5
"""The same: of parts that repeat."""


class Scheme(Protocol):
    """How a checkpoint stores its quantized matrices."""

    def open(self, layer: StoredLayer) -> QuantizedTensor:
        """A matrix. MODEL_LOAD_FAILED where its parts contradict each other, the model or the label."""
        ...


def integer(label: Label, *keys: str, choices: Sequence[int] = ()) -> int:
    """The first of these keys that is there, a whole number (one of `choices` where given)."""
    value = stated(label, *keys)
    if isinstance(value, bool) or not isinstance(value, int) or (choices and value not in choices):
        wanted = f"one of {', '.join(map(str, choices))}" if choices else "a whole number"
        raise load_failed(f"quantization_config: {keys[0]} is {value!r}, expected {wanted}")
    return value


def choice(label: Label, key: str, choices: Sequence[Word], default: Word) -> Word:
    """A word out of `choices`, whatever its case; `default` where it is absent."""
    value = label.get(key)
    for known in choices:
        if known == (default if value is None else str(value).lower()):
            return known
    raise load_failed(f"quantization_config: {key} is {value!r}, expected one of {', '.join(choices)}")


def flag(label: Label, key: str) -> bool | None:
    """True or false; None where it is absent."""
    value = label.get(key)
    if value is not None and not isinstance(value, bool):
        raise load_failed(f"quantization_config: {key} is {value!r}, expected true or false")
    return value


def pattern(key: str, stated: str, prefix: str) -> re.Pattern[str]:
    """A pattern of module names. MODEL_LOAD_FAILED where it is none, or one that some names take for ever to match.

    Time grows with the power of the repeats, and beyond all bounds where what is repeated repeats something itself.
    """
    text, where = stated.removeprefix(prefix), f"quantization_config: {key}: pattern {stated!r}"
    repeats = len(re.findall(r"[*+{]|(?<![(*+}])\?", text))
    if len(text) > _MOST_LETTERS or repeats > _MOST_REPEATS or re.search(r"\)[*+{]", text):
        raise load_failed(
            f"{where}: expected at most {_MOST_LETTERS} letters and {_MOST_REPEATS} repeats, none of a group"
        )
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise load_failed(f"{where}: {error}") from error


def stated(label: Label, *keys: str) -> Any:
    """The value of the first of these keys that is there and not null."""
    return next((label[key] for key in keys if label.get(key) is not None), None)
