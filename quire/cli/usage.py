"""`quire usage`: what tenants used, by day and model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta

from quire.cli.common import add_address, failures, gateway, parser
from quire.cli.plain import plain
from quire.cli.tables import align
from quire.v1 import admin_pb2


def run(argv: Sequence[str]) -> int:
    args = parser(
        "usage",
        "Shows requests and tokens by day (UTC), tenant and model. Where keys are on it needs one of scope admin. A\n"
        "gateway without Redis tells what it served since it started.",
        "quire usage                                  today\n"
        "quire usage --days 30 --tenant acme\n"
        "quire usage --from 2026-11-01 --to 2026-11-30 --json",
    )
    span = args.add_mutually_exclusive_group()
    span.add_argument("--days", type=int, default=1, metavar="N", help="that many days up to --to (default: 1)")
    span.add_argument("--from", dest="first", type=date.fromisoformat, metavar="DAY", help="first day, as YYYY-MM-DD")
    args.add_argument("--to", dest="last", type=date.fromisoformat, metavar="DAY", help="last day (default: today)")
    args.add_argument("--tenant", default="", metavar="TENANT", help="of one tenant (default: all)")
    add_address(args)
    args.add_argument("--json", action="store_true", help="print a JSON array")
    given = args.parse_args(argv)
    if given.days < 1:
        args.error("--days: at least 1")
    last = given.last or datetime.now(UTC).date()
    first = given.first or last - timedelta(days=given.days - 1)
    with failures("usage"), gateway(given) as client:
        rows = client.usage(first, last, tenant=given.tenant)
    print(json.dumps([plain(row) for row in rows]) if given.json else _table(rows))
    return 0


def _table(rows: Sequence[admin_pb2.UsageRow]) -> str:
    if not rows:
        return "nothing was used"
    lines = [("DAY", "TENANT", "MODEL", "REQUESTS", "PROMPT", "CACHED", "OUTPUT")]
    for row in rows:
        counts = (row.request_count, row.prompt_tokens, row.cached_tokens, row.output_tokens)
        lines.append((row.day, row.tenant, row.model, *(f"{count:,}" for count in counts)))  # type: ignore[arg-type]
    return align(lines, right={3, 4, 5, 6})
