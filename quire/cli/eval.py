"""`quire eval perplexity` and `quire eval agreement`: how well a model computes, each with its own flags."""

from __future__ import annotations

from collections.abc import Sequence

from quire.cli.kinds import run_kind

KINDS = {"perplexity": "services.executor.eval.perplexity", "agreement": "services.executor.eval.agreement"}
USAGE = """usage: quire eval {perplexity,agreement} ...

  perplexity   how well a model predicts a text
  agreement    how far a model's predictions are from those of another model, backend or number format

Both load the model into this process; no service is needed. `quire eval KIND --help` lists the flags.

examples:
  quire eval perplexity --text book.txt --tokens 20000
  quire eval agreement --backend cpu --against-backend torch --json"""


def run(argv: Sequence[str]) -> int:
    return run_kind("eval", KINDS, USAGE, argv)
