"""The document of keys and tenants: what it may say, and the roster that comes of it. Pure.

[[keys]]
tenant = "acme"
sha256 = "..."                  # of the key, in hexadecimal
scopes = ["infer", "admin"]     # of infer, admin, metrics; default ["infer"]
requests_per_minute = 60        # and all other limits, of this key alone
created = 2026-11-30T12:00:00Z  # optional, for people
expires = 2027-11-30T12:00:00Z  # optional; from then on the key opens nothing

[tenants.acme]                  # optional
weight = 2.0                    # share beside other tenants, above 0; default 1
max_priority = 10               # the most urgent that its requests may be; default 0
requests_per_minute = 600       # these and the following: default none
tokens_per_minute = 100000      # of prompts and output
concurrent_requests = 16
queue_share = 0.25              # of the scheduler's queue, that may be the tenant's
max_context_tokens = 8192       # prompt and output of a request
max_output_tokens = 1024        # of each choice
models = ["small"]              # that may be asked for

[tenants."*"]                   # optional: of every tenant that has no table of its own

[oidc]                          # optional: signed tokens (JWT) of an identity provider open as well
issuer = "https://id.example.com"
audience = "quire"
tenant_claim = "tenant"         # default
jwks = "https://..."            # default: as the issuer's /.well-known/openid-configuration says
"""

from __future__ import annotations

import hmac
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from services.common.limits import MAX_PRIORITY
from services.gateway.caller import Caller, Entry, Scope, key_id
from services.gateway.quota.limits import MAX_PER_MINUTE, Caps, Rates, Subject, strictest

MAX_WEIGHT = 1e6
TENANT_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"

EVERY_OTHER = "*"
_TENANT_OR_ALL = TENANT_PATTERN.replace("^", r"^(\*|").replace("$", ")$")

_TenantName = Annotated[str, Field(pattern=TENANT_PATTERN)]


def check_address(address: str) -> str:
    """An address that nobody between can change: https, or this machine. Raises ValueError for others."""
    url = urlsplit(address)
    local = url.scheme == "http" and url.hostname in ("localhost", "127.0.0.1", "::1")
    if not url.hostname or not (url.scheme == "https" or local):
        raise ValueError(f"{address!r} is not https://...")
    return address


class _Strict(BaseModel):
    # No input in messages: it may be a key that was written in the place of its digest.
    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)


class _Limited(_Strict):
    """What tenants and keys may both be limited to."""

    requests_per_minute: int | None = Field(default=None, ge=1, le=MAX_PER_MINUTE)
    tokens_per_minute: int | None = Field(default=None, ge=1, le=MAX_PER_MINUTE)
    concurrent_requests: int | None = Field(default=None, ge=1)
    queue_share: float | None = Field(default=None, gt=0, le=1)
    max_context_tokens: int | None = Field(default=None, ge=2)
    max_output_tokens: int | None = Field(default=None, ge=1)
    models: list[str] | None = Field(default=None, min_length=1)

    @property
    def rates(self) -> Rates:
        return Rates(self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests)

    @property
    def caps(self) -> Caps:
        models = None if self.models is None else frozenset(self.models)
        return Caps(self.max_context_tokens, self.max_output_tokens, models, self.queue_share)


class Key(_Limited):
    """One API key."""

    tenant: _TenantName
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    scopes: list[Literal["infer", "admin", "metrics"]] = Field(default=["infer"], min_length=1)
    created: AwareDatetime | None = None
    expires: AwareDatetime | None = None
    max_priority: int | None = Field(default=None, ge=0, le=MAX_PRIORITY)  # the tenant's, where none is said

    @property
    def id(self) -> str:
        return key_id(bytes.fromhex(self.sha256))


class Tenant(_Limited):
    """What holds for all keys of a tenant."""

    weight: float = Field(default=1.0, gt=0, le=MAX_WEIGHT)
    max_priority: int = Field(default=0, ge=0, le=MAX_PRIORITY)


class Oidc(_Strict):
    """Whose tokens open, and how they name a tenant."""

    issuer: Annotated[str, AfterValidator(check_address)]
    audience: str = Field(min_length=1)
    tenant_claim: str = Field(default="tenant", min_length=1)
    jwks: Annotated[str, AfterValidator(check_address)] | None = None


class Document(_Strict):
    """All of it."""

    keys: list[Key] = Field(default_factory=list)
    tenants: dict[Annotated[str, Field(pattern=_TENANT_OR_ALL)], Tenant] = Field(default_factory=dict)
    oidc: Oidc | None = None


@dataclass(frozen=True)
class Roster:
    """Who is known."""

    _groups: Mapping[int, Mapping[bytes, Entry]]  # by the first byte of the digest
    _tenants: Mapping[str, Tenant]
    oidc: Oidc | None

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

    def member(self, tenant: str, scopes: frozenset[Scope]) -> Caller:
        """Who shows a token of a tenant."""
        said = _of(self._tenants, tenant)
        subject = Subject(tenant, "", said.rates)
        counted = (subject,) if subject.rates else ()
        return Caller(tenant, "", said.weight, said.max_priority, scopes, said.caps, counted)


def parse(text: str) -> Document:
    """The document. Raises ValueError naming the field that is wrong."""
    try:
        document = Document.model_validate(tomllib.loads(text))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{_dotted(problem['loc'])}: {problem['msg']}") from None
    if not document.keys and document.oidc is None:
        raise ValueError("keys: there is none, nor are there tokens ([oidc]): nobody could come in")
    _check_unique(key.sha256 for key in document.keys)
    idle = document.tenants.keys() - {key.tenant for key in document.keys} - {EVERY_OTHER}
    if idle and document.oidc is None:  # whom tokens name, nobody knows
        raise ValueError(f"tenants.{min(idle)}: no key is of this tenant")
    return document


def roster_of(document: Document) -> Roster:
    """Who is known by a document."""
    groups: defaultdict[int, dict[bytes, Entry]] = defaultdict(dict)
    for key in document.keys:
        caller = _caller(key.tenant, _of(document.tenants, key.tenant), key)
        digest = bytes.fromhex(key.sha256)
        groups[digest[0]][digest] = Entry(caller, key.expires.timestamp() if key.expires else None)
    return Roster(dict(groups), document.tenants, document.oidc)


def _of(tenants: Mapping[str, Tenant], name: str) -> Tenant:
    return tenants.get(name) or tenants.get(EVERY_OTHER) or Tenant()


def _caller(name: str, tenant: Tenant, key: Key) -> Caller:
    """Who shows a key: what is allowed is allowed by both the key and its tenant."""
    subjects = Subject(name, "", tenant.rates), Subject(name, key.id, key.rates)
    return Caller(
        name,
        key.id,
        tenant.weight,
        tenant.max_priority if key.max_priority is None else min(key.max_priority, tenant.max_priority),
        frozenset(map(Scope, key.scopes)),
        strictest((tenant.caps, key.caps)),
        tuple(subject for subject in subjects if subject.rates),
    )


def _check_unique(digests: Iterable[str]) -> None:
    seen: set[str] = set()
    for at, digest in enumerate(digests):
        if digest in seen:
            raise ValueError(f"keys[{at}].sha256: is there twice")
        seen.add(digest)


def _dotted(path: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
