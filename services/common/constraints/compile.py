"""Compiles grammars, within limits that no text of theirs can stretch."""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from services.common.errors import QuireError, invalid

MAX_MESSAGE = 200
LIMITS = LLParserLimits(max_lexer_states=10_000, verbose_errors=False)
"""A state takes up to 2 kB. The other limits, those of the library, bound a mask to about 15 ms."""


def compile_grammar(tokenizer: LLTokenizer, grammar: str, path: str) -> LLMatcher:
    """A matcher at the grammar's beginning, which has looked for the first token.

    Takes up to a second without the GIL. Raises INVALID_FIELD where the grammar is wrong, too complex, or allows
    nothing at all; `path` is the field that it came from.
    """
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise refusal(path, "cannot be followed", matcher)
    return matcher


def refusal(path: str, what: str, matcher: LLMatcher) -> QuireError:
    """Why a matcher cannot go on, in one short line."""
    text = matcher.get_error().replace("<non-verbose/>", "")
    if text.startswith("NoExtension"):
        text = "it allows no text to end"
    return invalid(path, f"{what}: {' '.join(text.split())[:MAX_MESSAGE]}")
