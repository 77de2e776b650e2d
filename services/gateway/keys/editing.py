"""Changes of the document's text that leave all else in it, comments too, as people wrote it. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime

from services.gateway.caller import digest_of
from services.gateway.keys.document import EVERY_OTHER, Document, parse

_HEADER = re.compile(r"^\s*\[")  # of any table
_KEY_HEADER = re.compile(r"^\s*\[\[\s*keys\s*\]\]")
_OF_KEY = re.compile(r"^\s*\[\s*keys\s*\.")  # a table inside the key above


def entry_text(tenant: str, key: str, scopes: Sequence[str], created: datetime | None, expires: datetime | None) -> str:
    """The lines of a new key."""
    lines = ["[[keys]]", f'tenant = "{tenant}"', f'sha256 = "{digest_of(key).hex()}"']
    lines.append(f"scopes = {json.dumps(list(scopes))}")
    lines += [f"{name} = {when.isoformat()}" for name, when in (("created", created), ("expires", expires)) if when]
    return "\n".join(lines) + "\n"


def with_key(text: str, entry: str) -> str:
    """The document with the lines of a new key at its end. ValueError where it is none then."""
    gap = "\n" if text.strip() else ""
    changed = text + ("" if not text or text.endswith("\n") else "\n") + gap + entry
    parse(changed)
    return changed


def without_key(text: str, key: str) -> str:
    """The document without the key of that id. ValueError where there is none, or where only a person can do it."""
    before = parse(text)
    gone = [one for one in before.keys if one.id == key]
    if not gone:
        raise ValueError(f"no key has the id {key}")
    if len(before.keys) == 1 and before.oidc is None:
        raise ValueError("it is the only key: create another one before, or stop the gateway")
    lines = text.splitlines(keepends=True)
    starts = [at for at, line in enumerate(lines) if _KEY_HEADER.match(line)]
    for start in starts:
        end = start + 1
        while end < len(lines) and (not _HEADER.match(lines[end]) or _OF_KEY.match(lines[end])):
            end += 1
        if gone[0].sha256 in "".join(lines[start:end]):
            changed = "".join(lines[:start] + lines[end:])
            break
    else:
        raise ValueError(f"the lines of key {key} are written in a way that only a person can edit")
    _check_only_gone(before, changed, key)
    return changed


def _check_only_gone(before: Document, changed: str, key: str) -> None:
    """Nothing else may have changed, whatever the text looks like."""
    rest = [one for one in before.keys if one.id != key]
    tenants = {one.tenant for one in rest}
    idle = before.tenants.keys() - tenants - {EVERY_OTHER}
    if idle and before.oidc is None:
        raise ValueError(f"it is the last key of {min(idle)}: take out [tenants.{min(idle)}] first")
    after = parse(changed)
    if after != before.model_copy(update={"keys": rest}):
        raise ValueError(f"the lines of key {key} are written in a way that only a person can edit")
