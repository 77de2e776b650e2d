"""`quire eval perplexity` and `quire eval agreement`: how well a model computes, each with its own flags."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

KINDS = {"perplexity": "services.executor.eval.perplexity", "agreement": "services.executor.eval.agreement"}
USAGE = """usage: quire eval {perplexity,agreement} ...

  perplexity   how well a model predicts a text
  agreement    how far a model's predictions are from those of another model, backend or number format

Both load the model into this process; no service is needed. `quire eval KIND --help` lists the flags.

examples:
  quire eval perplexity --text book.txt --tokens 20000
  quire eval agreement --backend cpu --against-backend torch --json"""


def run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    if argv[0] not in KINDS:
        print(f"quire eval: no such kind: {argv[0]}; one of {', '.join(KINDS)}", file=sys.stderr)
        return 2
    status: int = importlib.import_module(KINDS[argv[0]]).main(list(argv[1:]))
    return status
