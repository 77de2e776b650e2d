"""Names of calls: drawn from the request, so that an answer that is given again names them as before."""

from __future__ import annotations

import hashlib

from services.gateway.events import Started


def call_id(started: Started, choice: int, index: int, prefix: str = "call_") -> str:
    """The id of one call, or of another part of an answer that has a prefix of its own."""
    text = f"{started.request_id}\0{started.created}\0{choice}\0{index}"
    return prefix + hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
