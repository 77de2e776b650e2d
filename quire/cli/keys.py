"""`quire keys`: API keys in the gateway's document of keys."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from quire.cli.common import Failure, failures, parser
from quire.cli.tables import align
from services.gateway.caller import Scope, digest_of, key_id
from services.gateway.keys.document import TENANT_PATTERN, Key, parse
from services.gateway.keys.editing import entry_text, with_key, without_key
from services.gateway.keys.file import FilePlace
from services.gateway.keys.redis import RedisPlace

KEY_BYTES = 32  # of randomness
_PERIOD = re.compile(r"([1-9][0-9]{0,4})([hd])")


def run(argv: Sequence[str]) -> int:
    args = parser(
        "keys",
        "Makes, lists and revokes API keys. A file, or Redis, holds only their digests, so a key is shown\n"
        "once and kept by whom it is for. Running gateways follow: nothing has to be restarted.",
        "quire keys create acme                        then: quire up --keys keys.toml\n"
        "quire keys create operator --scope infer --scope admin --scope metrics\n"
        "quire keys create acme --expires 90d          hours (h), days (d) or a date\n"
        "quire keys list\n"
        "quire keys revoke 1f2e3d4c5b6a                its ID in the list\n"
        "quire keys import keys.toml --redis URL       for gateways with --keys redis --redis URL",
    )
    actions = args.add_subparsers(dest="action", required=True, metavar="{create,list,revoke,import}")
    create = actions.add_parser("create", help="make a key", description="Makes a key and shows it once.")
    create.add_argument("tenant", metavar="TENANT", help="whom the key's requests count for")
    create.add_argument(
        "--scope",
        action="append",
        choices=[scope.value for scope in Scope],
        help="what it opens; repeatable (default: infer). admin: state of all services, models; metrics: /metrics",
    )
    create.add_argument(
        "--expires", metavar="WHEN", type=_moment, help="from when on it opens nothing (default: never)"
    )
    listing = actions.add_parser("list", help="list the keys", description="Lists the keys, without what opens.")
    revoke = actions.add_parser(
        "revoke", help="take a key away", description="Takes a key away; answers that run go on."
    )
    revoke.add_argument("id", metavar="ID", help="of the key, as `quire keys list` shows it")
    imported = actions.add_parser(
        "import",
        help="take a whole document over",
        description="Puts the document of a file, with its tenants and limits, in the place of the one that is there.",
    )
    imported.add_argument("file", metavar="DOCUMENT", type=Path, help="a file as docs/access.md describes it")
    for action in (create, listing, revoke, imported):
        action.add_argument("--keys", metavar="FILE", type=Path, default=Path("keys.toml"), help="(default: keys.toml)")
        action.add_argument(
            "--redis", metavar="URL", help="the keys in Redis instead (default: $QUIRE_GATEWAY_REDIS, if set)"
        )
        action.add_argument("--json", action="store_true", help="print JSON")
    given = args.parse_args(argv)
    with failures("keys"):
        try:
            return {"create": _create, "list": _list, "revoke": _revoke, "import": _import}[given.action](
                given, _place(given)
            )
        except ValueError as error:
            raise Failure(str(error)) from error


def _place(given: argparse.Namespace) -> FilePlace | RedisPlace:
    url = given.redis or os.environ.get("QUIRE_GATEWAY_REDIS")
    return RedisPlace(url) if url else FilePlace(given.keys)


def _import(given: argparse.Namespace, place: FilePlace | RedisPlace) -> int:
    text = FilePlace(given.file).read()
    count = len(parse(text).keys)
    place.edit(lambda _: text)
    print(json.dumps({"keys": count}) if given.json else f"{count} keys from {given.file}")
    return 0


def _create(given: argparse.Namespace, place: FilePlace | RedisPlace) -> int:
    if not re.fullmatch(TENANT_PATTERN, given.tenant) or given.tenant.endswith("\n"):
        raise ValueError(f"{given.tenant!r} is no tenant's name (letters, digits and . _ -, at most 64)")
    key = f"qk-{secrets.token_urlsafe(KEY_BYTES)}"
    scopes = given.scope or [Scope.INFER.value]
    now = datetime.now(UTC).replace(microsecond=0)
    place.edit(lambda text: with_key(text, entry_text(given.tenant, key, scopes, now, given.expires)))
    made = {"id": key_id(digest_of(key)), "tenant": given.tenant, "scopes": scopes, "key": key}
    if given.json:
        print(json.dumps(made | {"expires": _text(given.expires) or None}))
    else:
        print(f"key {made['id']} of {given.tenant}, shown only now: {key}")
    return 0


def _list(given: argparse.Namespace, place: FilePlace | RedisPlace) -> int:
    text = place.read()
    keys = parse(text).keys if text.strip() else []
    if given.json:
        print(json.dumps([_plain(key) for key in keys]))
    elif not keys:
        print("no keys")
    else:
        now = datetime.now(UTC)
        rows = [("ID", "TENANT", "SCOPES", "CREATED", "EXPIRES")]
        for key in keys:
            late = " (expired)" if key.expires and key.expires <= now else ""
            expires = _text(key.expires) or "never"
            rows.append((key.id, key.tenant, " ".join(key.scopes), _text(key.created) or "unknown", expires + late))
        print(align(rows))
    return 0


def _revoke(given: argparse.Namespace, place: FilePlace | RedisPlace) -> int:
    place.edit(lambda text: without_key(text, given.id))
    print(json.dumps({"id": given.id, "revoked": True}) if given.json else f"key {given.id} opens nothing any more")
    return 0


def _plain(key: Key) -> dict[str, Any]:
    times = {"created": _text(key.created) or None, "expires": _text(key.expires) or None}
    return {"id": key.id, "tenant": key.tenant, "scopes": key.scopes, **times}


def _text(when: datetime | None) -> str:
    return when.astimezone(UTC).isoformat(timespec="minutes").replace("+00:00", "Z") if when else ""


def _moment(text: str) -> datetime:
    """From "90d", "12h" or a date or time of ISO 8601, which without a zone is UTC."""
    if found := _PERIOD.fullmatch(text):
        hours = int(found[1]) * (24 if found[2] == "d" else 1)
        return datetime.now(UTC).replace(microsecond=0) + timedelta(hours=hours)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither hours (12h), days (90d) nor a date") from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    if moment <= datetime.now(UTC):
        raise argparse.ArgumentTypeError(f"{text} is past")
    return moment
