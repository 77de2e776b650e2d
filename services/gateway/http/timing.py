"""How soon a client wants its answer, from the headers that are in use for it. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.limits import MAX_TARGET_MS
from services.gateway.http.errors import bad_request

DEADLINE = "x-envoy-expected-rq-timeout-ms"
FIRST_TOKEN, TOKEN_GAP = "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"
OLDER_NAMES: Mapping[str, str] = {FIRST_TOKEN: "x-slo-ttft-ms", TOKEN_GAP: "x-slo-tpot-ms"}

_NUMBER = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?")
_MEANINGS = {
    DEADLINE: "Milliseconds that the client waits for the whole answer; the request ends then. Envoy sets it.",
    FIRST_TOKEN: "Milliseconds to the first token that the client aims at.",
    OLDER_NAMES[FIRST_TOKEN]: f"Older name of {FIRST_TOKEN}.",
    TOKEN_GAP: "Milliseconds between tokens that the client aims at.",
    OLDER_NAMES[TOKEN_GAP]: f"Older name of {TOKEN_GAP}.",
}


@dataclass(frozen=True, slots=True)
class Timing:
    """A moment to end at, in seconds of the clock that was read, and what the client aims at, 0 for none."""

    deadline_at: float | None
    first_token_ms: int
    token_gap_ms: int

    def left(self, now: float) -> float | None:
        """Seconds left; None where the client waits for as long as it takes."""
        return None if self.deadline_at is None else self.deadline_at - now


def read_timing(headers: Mapping[str, str], now: float) -> Timing:
    """Raises HttpError 400 naming a header that is no number of milliseconds, or that contradicts its older name."""
    deadline = _read(headers, DEADLINE)
    deadline_at = now + deadline / 1000 if deadline else None
    return Timing(deadline_at, _read_either(headers, FIRST_TOKEN), _read_either(headers, TOKEN_GAP))


def header_parameters() -> list[dict[str, Any]]:
    """The headers as OpenAPI describes parameters."""
    schema = {"type": "number", "minimum": 0, "maximum": MAX_TARGET_MS}
    return [{"name": name, "in": "header", "description": text, "schema": schema} for name, text in _MEANINGS.items()]


def _read_either(headers: Mapping[str, str], name: str) -> int:
    older = OLDER_NAMES[name]
    value, earlier = _read(headers, name), _read(headers, older)
    if name in headers and older in headers and value != earlier:
        raise bad_request(older, f"differs from {name}, its newer name")
    return value or earlier


def _read(headers: Mapping[str, str], name: str) -> int:
    text = headers.get(name, "0").strip()
    if not _NUMBER.fullmatch(text) or float(text) > MAX_TARGET_MS:
        raise bad_request(name, f"must be a number of milliseconds in [0, {MAX_TARGET_MS}]")
    return math.ceil(float(text))
