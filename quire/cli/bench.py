"""`quire bench engine` and `quire bench serve`: measurements, each with its own flags."""

from __future__ import annotations

from collections.abc import Sequence

from quire.cli.kinds import run_kind

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
    return run_kind("bench", KINDS, USAGE, argv)
