"""`quire down`: ends the run of `quire up`, detached or not."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence

from quire.cli.common import Failure, failures, parser
from quire.supervisor.rundir import RunDirectory


def run(argv: Sequence[str]) -> int:
    args = parser(
        "down",
        "Lets running streams finish, then ends all services in order.",
        "quire down\nquire down --now     (end at once)",
    )
    args.add_argument("--now", action="store_true", help="do not wait for running streams")
    args.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="how long to wait (default: 120)")
    args.add_argument("--json", action="store_true", help="print a JSON object")
    given = args.parse_args(argv)
    directory = RunDirectory()
    live = directory.live()
    with failures("down"):
        if live is not None:
            _end(directory, live.pid, now=given.now, timeout=given.timeout)
    if given.json:
        print(json.dumps({"stopped": live is not None}))
    else:
        print("stopped" if live is not None else "nothing is running")
    return 0


def _end(directory: RunDirectory, pid: int, *, now: bool, timeout: float) -> None:
    try:
        os.kill(pid, signal.SIGTERM)
        if now:
            time.sleep(0.2)  # a second signal is a second wish only once the first was taken
            os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError:
        raise Failure(f"the run belongs to another user (process {pid})") from None
    deadline = time.monotonic() + timeout
    while directory.is_held():
        if time.monotonic() > deadline:
            raise Failure(f"still draining after {timeout:g} s (process {pid}); `quire down --now` ends it at once")
        time.sleep(0.05)
