"""API keys in a TOML file: digests with their tenants, read again whenever the file has changed.

[[keys]]
tenant = "acme"
sha256 = "..."      # of the key, in hexadecimal
admin = true        # may also see the state of all services and change models; default false

[tenants.acme]      # optional
weight = 2.0        # share beside other tenants, above 0; default 1
max_priority = 10   # the most urgent that its requests may be; default 0
"""

from __future__ import annotations

import hmac
import logging
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.common.limits import MAX_PRIORITY
from services.gateway.identity import Caller

log = logging.getLogger("quire.gateway.keys")

MAX_WEIGHT = 1e6
TENANT_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"

_TenantName = Annotated[str, Field(pattern=TENANT_PATTERN)]
_Stamp = tuple[int, int, int]


class _Strict(BaseModel):
    # No input in messages: it may be a key that was written in the place of its digest.
    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)


class _Key(_Strict):
    tenant: _TenantName
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    admin: bool = False


class _Tenant(_Strict):
    weight: float = Field(default=1.0, gt=0, le=MAX_WEIGHT)
    max_priority: int = Field(default=0, ge=0, le=MAX_PRIORITY)


class _File(_Strict):
    keys: list[_Key] = Field(min_length=1)
    tenants: dict[_TenantName, _Tenant] = Field(default_factory=dict)


class KeyFile:
    """The keys of one file. A file that became unreadable changes nothing; the log says so once."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError, naming what is wrong, where the file cannot be read."""
        self._path = path
        self._stamp = _stamp(path)
        self._callers = read_keys(path)

    async def find(self, digest: bytes) -> Caller | None:
        """See `identity.Keys`. Compares with every key, so that the time tells nothing of a match."""
        self._follow()
        found = None
        for known, caller in self._callers.items():
            if hmac.compare_digest(known, digest):
                found = caller
        return found

    def _follow(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._callers = read_keys(self._path)
        except ValueError as error:
            log.error("the keys stay as they were", extra={"error": str(error)})
        else:
            log.info("keys read", extra={"keys": len(self._callers)})


def read_keys(path: Path) -> Mapping[bytes, Caller]:
    """Callers by the digest of their key. Raises ValueError naming file and field."""
    try:
        file = _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{path}: {_dotted(problem['loc'])}: {problem['msg']}") from None
    except ValueError as error:  # neither text nor TOML
        raise ValueError(f"{path}: {error}") from None
    if idle := file.tenants.keys() - {key.tenant for key in file.keys}:
        raise ValueError(f"{path}: tenants.{min(idle)}: no key is of this tenant")
    callers: dict[bytes, Caller] = {}
    for at, key in enumerate(file.keys):
        digest = bytes.fromhex(key.sha256)
        if digest in callers:
            raise ValueError(f"{path}: keys[{at}].sha256: is there twice")
        tenant = file.tenants.get(key.tenant, _Tenant())
        callers[digest] = Caller(key.tenant, tenant.weight, tenant.max_priority, key.admin)
    return callers


def _stamp(path: Path) -> _Stamp | None:
    """What changes with the file; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _dotted(path: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
