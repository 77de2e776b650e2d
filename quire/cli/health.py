"""`quire health TARGET`: the standard gRPC health check, for people and for container health checks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from quire.cli.common import parser
from quire.supervisor import health


def run(argv: Sequence[str]) -> int:
    args = parser(
        "health",
        "Asks a service for its health; the exit status is 0 where it is SERVING.",
        "quire health 127.0.0.1:50051\nquire health --service liveness 127.0.0.1:50054",
    )
    args.add_argument("target", metavar="HOST:PORT")
    args.add_argument("--service", default="", help='what to ask for: "" (ready), "liveness" or a gRPC service name')
    args.add_argument("--timeout", type=float, default=2.0, metavar="SECONDS")
    args.add_argument("--json", action="store_true", help="print a JSON object")
    given = args.parse_args(argv)
    answer = asyncio.run(health.ask(given.target, given.service, given.timeout))
    print(json.dumps({"target": given.target, "service": given.service, "status": answer}) if given.json else answer)
    return 0 if answer == "SERVING" else 1
