"""`quire bench engine` and `quire bench serve`: measurements, each with its own flags."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

KINDS = {"engine": "services.executor.bench", "serve": "quire.bench.serve"}
USAGE = """usage: quire bench {engine,serve} ...

  engine   the executor alone, in this process: prefill and decode tokens per second at given batch sizes
  serve    a load generator against any running server, over gRPC or the OpenAI API

`quire bench KIND --help` lists the flags.

examples:
  quire bench engine --batch 1,8,32 --prompt 128 --output 64 --json
  quire bench serve --concurrency 8 --json
  quire bench serve --api openai --base-url http://127.0.0.1:8000/v1 --rate 4"""


def run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    if argv[0] not in KINDS:
        print(f"quire bench: no such kind: {argv[0]}; one of {', '.join(KINDS)}", file=sys.stderr)
        return 2
    status: int = importlib.import_module(KINDS[argv[0]]).main(list(argv[1:]))
    return status
