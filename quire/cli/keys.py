"""`quire keys`: API keys for the gateway's file of keys."""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import Sequence

from quire.cli.common import parser
from services.gateway.identity import digest_of
from services.gateway.key_file import TENANT_PATTERN

KEY_BYTES = 32  # of randomness


def run(argv: Sequence[str]) -> int:
    args = parser(
        "keys",
        "Makes API keys. The gateway's file of keys holds only their digests, so a key is shown once and kept by whom\n"
        "it is for. The lines for the file go to standard output, the key to standard error.",
        "quire keys new acme >> keys.toml             then: quire up --keys keys.toml\n"
        "quire keys new operator --admin >> keys.toml    may also see all state and change models\n"
        "quire keys new acme --json                   key and lines in one object",
    )
    actions = args.add_subparsers(dest="action", required=True, metavar="{new}")
    new = actions.add_parser("new", help="make a key", description="Makes a key.")
    new.add_argument("tenant", metavar="TENANT", help="whom the key's requests count for")
    new.add_argument("--admin", action="store_true", help="it may also see the state of all services and change models")
    new.add_argument("--json", action="store_true", help="print a JSON object")
    given = args.parse_args(argv)
    if not re.fullmatch(TENANT_PATTERN, given.tenant):
        args.error(f"{given.tenant!r} is no tenant's name (letters, digits and . _ -, at most 64)")
    key = f"qk-{secrets.token_urlsafe(KEY_BYTES)}"
    lines = _lines(given.tenant, key, admin=given.admin)
    if given.json:
        print(json.dumps({"tenant": given.tenant, "key": key, "toml": lines}))
    else:
        print(f"key of {given.tenant}, shown only now: {key}", file=sys.stderr)
        print(lines)
    return 0


def _lines(tenant: str, key: str, *, admin: bool) -> str:
    lines = ["[[keys]]", f'tenant = "{tenant}"', f'sha256 = "{digest_of(key).hex()}"']
    return "\n".join([*lines, *(["admin = true"] if admin else [])])
