"""Log probabilities in OpenAI's two shapes, and of prompts. Pure; every number is finite, as JSON demands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from services.common.errors import QuireError, Reason
from services.gateway.events import ScoredToken

FLOOR = -9999.0
"""Stands for minus infinity, as in OpenAI's API."""


def finite(logprob: float | None) -> float:
    if logprob is None or math.isnan(logprob):
        raise QuireError(Reason.NOT_FINITE, "a log probability is not a number")
    return max(logprob, FLOOR)


def chat_logprobs(tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    """{"content": [...]}: per token its value and exactly as many alternatives as were asked for."""
    content = [_chat_token(token) | {"top_logprobs": [_chat_token(other) for other in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def _chat_token(token: ScoredToken) -> dict[str, Any]:
    return {
        "token": token.token.decode("utf-8", "replace"),
        "logprob": finite(token.logprob),
        "bytes": list(token.token),
    }


class CompletionLogprobs:
    """The parallel lists of the completions API; knows where in its choice's text the next token begins."""

    def __init__(self) -> None:
        self._characters = 0  # that tokens so far began

    def render(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        """Lists of these tokens, which follow those of earlier calls."""
        return {
            "tokens": [_key(token) for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [_alternatives(token) for token in tokens],
            "text_offset": [self._advance(token.token) for token in tokens],
        }

    def _advance(self, token: bytes) -> int:
        # A byte 10xxxxxx goes on with a character that an earlier byte began.
        inside = bool(token) and token[0] & 0xC0 == 0x80 and self._characters > 0
        offset = self._characters - inside
        self._characters += sum(byte & 0xC0 != 0x80 for byte in token)
        return offset


def _alternatives(token: ScoredToken) -> dict[str, float]:
    """By text, most likely first, with the chosen token; two tokens of one text stay two entries."""
    result: dict[str, float] = {}
    chosen = () if any(other.token_id == token.token_id for other in token.top) else (token,)
    for other in (*token.top, *chosen):
        key = _key(other)
        result[f"token_id:{other.token_id}" if key in result else key] = finite(other.logprob)
    return result


def _key(token: ScoredToken) -> str:
    """The token's text; parts of characters in OpenAI's notation bytes:\\xe2\\x82."""
    try:
        return token.token.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.token)


def prompt_logprobs(tokens: Sequence[ScoredToken]) -> list[dict[str, Any] | None]:
    """Per prompt token its own value and the alternatives, by id; null for the first, which nothing precedes."""
    return [
        None
        if token.logprob is None
        else {
            str(one.token_id): {
                "logprob": finite(one.logprob),
                "rank": one.rank,
                "decoded_token": one.token.decode("utf-8", "replace"),
            }
            for one in (token, *token.top)
        }
        for token in tokens
    ]
