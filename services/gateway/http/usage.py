"""What a request cost, in OpenAI's shape. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from services.gateway.events import Finished


def render_usage(parts: Iterable[Finished]) -> dict[str, Any]:
    """The sum over a request's prompts; a prompt counts once however many choices it has."""
    parts = list(parts)
    prompt = sum(part.prompt_tokens for part in parts)
    completion = sum(part.completion_tokens for part in parts)
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(part.cached_tokens for part in parts)},
    }
    told = [part.reasoning_tokens for part in parts if part.reasoning_tokens is not None]
    return usage | {"completion_tokens_details": {"reasoning_tokens": sum(told)}} if told else usage
