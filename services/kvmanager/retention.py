"""What cached content is worth beyond its age: priorities, pins and quotas, as their owners state them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from services.common.sizes import parse_size

PRIORITIES = 101
"""Priorities run from 0, which goes first, to 100."""


class Retention(NamedTuple):
    """How released content is kept. What several users share has the most that any of them asked for."""

    priority: int = 0
    pin_seconds: float = 0.0  # not evicted for so long after this use


NO_RETENTION = Retention()


@dataclass(frozen=True, slots=True)
class Quota:
    """Cached content that a namespace may have in a pool before it is the first to lose some: a share, or bytes."""

    share: float = 0.0
    size: int = 0

    def blocks(self, block_count: int, block_bytes: int) -> int:
        """As a count of blocks of one pool. Raises ValueError for bytes where the size of a block is unknown."""
        if self.size and block_bytes <= 0:
            raise ValueError("a quota in bytes needs a pool that states the size of its blocks")
        return int(self.share * block_count) + (self.size // block_bytes if self.size else 0)


def parse_quotas(text: str) -> Mapping[str, Quota]:
    """From "tenant=25%,other=2GiB": per namespace a share of each pool or bytes in each. Raises ValueError."""
    quotas: dict[str, Quota] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, amount = part.rpartition("=")
        if not equals or name in quotas:
            raise ValueError(f"{part!r} is no quota such as tenant=25% or tenant=2GiB, each namespace once")
        quotas[name] = _share(amount[:-1]) if amount.endswith("%") else Quota(size=parse_size(amount))
    return quotas


def _share(percent: str) -> Quota:
    if not re.fullmatch(r"\d+(\.\d+)?", percent) or float(percent) > 100:
        raise ValueError(f"{percent}% is no share of a pool")
    return Quota(share=float(percent) / 100)
