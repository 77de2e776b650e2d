"""What is to propose drafts, as people say it: "none", "ngram", "early-exit", "early-exit:LAYERS", or a draft model."""

from __future__ import annotations

import re
from dataclasses import dataclass

_EARLY_EXIT = re.compile(r"early-exit(?::([1-9][0-9]{0,3}))?")


@dataclass(frozen=True, slots=True)
class DraftSetting:
    """At most one of these."""

    ngram: bool = False
    early_exit: bool = False
    layers: int | None = None  # of an early exit
    model: str | None = None  # the draft model's source


def parse_draft(text: str) -> DraftSetting:
    """Raises ValueError for what is none of them; whether a model is there shows when it is loaded."""
    if text == "none":
        return DraftSetting()
    if text == "ngram":
        return DraftSetting(ngram=True)
    if found := _EARLY_EXIT.fullmatch(text):
        return DraftSetting(early_exit=True, layers=int(found[1]) if found[1] else None)
    if not text or text.startswith("early-exit"):
        raise ValueError(f"{text!r} is neither none, ngram, early-exit[:LAYERS] nor a model")
    return DraftSetting(model=text)
