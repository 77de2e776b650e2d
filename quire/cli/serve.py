"""`quire serve ROLE`: one service in this process."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from quire.supervisor.layout import SUPERVISOR_PID

ROLES = ("gateway", "scheduler", "kvmanager", "executor")
USAGE = f"""usage: quire serve {{{",".join(ROLES)}}} [--config FILE] [flags of the service]

Runs one service until SIGTERM, then drains it. Each flag can be set as an environment variable QUIRE_<ROLE>_<FLAG>
or in a TOML file; `quire serve ROLE --help` lists the flags.

examples:
  quire serve kvmanager
  quire serve executor --model smollm2
  QUIRE_GATEWAY_HTTP_LISTEN=127.0.0.1:8080 quire serve gateway"""


def run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    role = argv[0]
    if role not in ROLES:
        print(f"quire serve: no such role: {role}; one of {', '.join(ROLES)}", file=sys.stderr)
        return 2
    if supervisor := os.environ.get(SUPERVISOR_PID):
        _end_with(int(supervisor))
    status: int = importlib.import_module(f"services.{role}.main").main(list(argv[1:]))
    return status


def _end_with(supervisor: int) -> None:
    """Has the kernel send SIGTERM when the supervisor is gone, so that its sudden death leaves no orphans."""
    if not sys.platform.startswith("linux"):
        return
    set_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_death_signal, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != supervisor:  # it died before the call
        sys.exit(1)
