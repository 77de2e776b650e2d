"""The document of keys and tenants: what it may say, and the roster that comes of it. Pure.

[[keys]]
tenant = "acme"
sha256 = "..."                  # of the key, in hexadecimal
scopes = ["infer", "admin"]     # of infer, admin, metrics; default ["infer"]
created = 2026-11-30T12:00:00Z  # optional, for people
expires = 2027-11-30T12:00:00Z  # optional; from then on the key opens nothing

[tenants.acme]                  # optional
weight = 2.0                    # share beside other tenants, above 0; default 1
max_priority = 10               # the most urgent that its requests may be; default 0
"""

from __future__ import annotations

import hmac
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from services.common.limits import MAX_PRIORITY
from services.gateway.identity import Caller, Entry, Scope, key_id

MAX_WEIGHT = 1e6
TENANT_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"

_TenantName = Annotated[str, Field(pattern=TENANT_PATTERN)]


class _Strict(BaseModel):
    # No input in messages: it may be a key that was written in the place of its digest.
    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)


class Key(_Strict):
    """One API key."""

    tenant: _TenantName
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    scopes: list[Literal["infer", "admin", "metrics"]] = Field(default=["infer"], min_length=1)
    created: AwareDatetime | None = None
    expires: AwareDatetime | None = None

    @property
    def id(self) -> str:
        return key_id(bytes.fromhex(self.sha256))


class Tenant(_Strict):
    """What holds for all keys of a tenant."""

    weight: float = Field(default=1.0, gt=0, le=MAX_WEIGHT)
    max_priority: int = Field(default=0, ge=0, le=MAX_PRIORITY)


class Document(_Strict):
    """All of it."""

    keys: list[Key] = Field(min_length=1)
    tenants: dict[_TenantName, Tenant] = Field(default_factory=dict)


@dataclass(frozen=True)
class Roster:
    """Who is known."""

    _groups: Mapping[int, Mapping[bytes, Entry]]  # by the first byte of the digest

    @classmethod
    def of(cls, entries: Mapping[bytes, Entry]) -> Roster:
        groups: defaultdict[int, dict[bytes, Entry]] = defaultdict(dict)
        for digest, entry in entries.items():
            groups[digest[0]][digest] = entry
        return cls(dict(groups))

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def find(self, digest: bytes) -> Entry | None:
        """Whose key has that `digest_of`; None where nobody's has.

        Compares with every key of the group, in constant time: how long it takes tells at most the first byte.
        """
        found = None
        for known, entry in self._groups.get(digest[0], {}).items():
            if hmac.compare_digest(known, digest):
                found = entry
        return found


def parse(text: str) -> Document:
    """The document. Raises ValueError naming the field that is wrong."""
    try:
        document = Document.model_validate(tomllib.loads(text))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{_dotted(problem['loc'])}: {problem['msg']}") from None
    _check_unique(key.sha256 for key in document.keys)
    if idle := document.tenants.keys() - {key.tenant for key in document.keys}:
        raise ValueError(f"tenants.{min(idle)}: no key is of this tenant")
    return document


def roster_of(document: Document) -> Roster:
    """Who is known by a document."""
    entries = {}
    for key in document.keys:
        tenant = document.tenants.get(key.tenant, Tenant())
        scopes = frozenset(map(Scope, key.scopes))
        caller = Caller(key.tenant, key.id, tenant.weight, tenant.max_priority, scopes)
        entries[bytes.fromhex(key.sha256)] = Entry(caller, key.expires.timestamp() if key.expires else None)
    return Roster.of(entries)


def _check_unique(digests: Iterable[str]) -> None:
    seen: set[str] = set()
    for at, digest in enumerate(digests):
        if digest in seen:
            raise ValueError(f"keys[{at}].sha256: is there twice")
        seen.add(digest)


def _dotted(path: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
