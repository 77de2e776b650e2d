"""Which of several schedulers gets a request: the same one for the same beginning, unless it has much more to do. Pure.

Rendezvous hashing: each scheduler has a rank for each prefix, whatever others there are, so that one that comes or goes
moves only its own share. With bounded load: one that has a quarter more than its share is passed over.
"""

from __future__ import annotations

import array
import hashlib
import math
from collections.abc import Mapping, Sequence

PREFIX_TOKENS = 128
"""So many tokens of a prompt decide: whole blocks of KV that requests may share."""
MOST_SHARES = 1.25


def prefix_key(tenant: str, model: str, prompt_ids: Sequence[int]) -> bytes:
    """What requests have in common that may find each other's prefix: tenants share none."""
    digest = hashlib.blake2b(digest_size=16)
    for text in (tenant, model):
        data = text.encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    digest.update(array.array("q", prompt_ids[:PREFIX_TOKENS]).tobytes())
    return digest.digest()


def choose(key: bytes, loads: Mapping[str, int]) -> str:
    """The scheduler for a key, of at least one. `loads` are choices that run or wait there, by name."""
    most = math.ceil(MOST_SHARES * (sum(loads.values()) + 1) / len(loads))
    ranked = sorted(loads, key=lambda name: (_weight(key, name), name), reverse=True)
    return next(name for name in ranked if loads[name] < most)


def _weight(key: bytes, name: str) -> bytes:
    return hashlib.blake2b(name.encode(), key=key, digest_size=8).digest()
