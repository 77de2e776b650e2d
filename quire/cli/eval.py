"""`quire eval perplexity`, `agreement` and `compare`: how well models compute, each with its own flags."""

from __future__ import annotations

from collections.abc import Sequence

from quire.cli.kinds import run_kind

KINDS = {kind: f"services.executor.eval.{kind}" for kind in ("perplexity", "agreement", "compare")}
USAGE = """usage: quire eval {perplexity,agreement,compare} ...

  perplexity   how well a model predicts a text
  agreement    how far a model's predictions are from those of another model, backend or number format
  compare      size, perplexity, agreement and speed of several models, in one table or picture

All load models into this process; no service is needed. `quire eval KIND --help` lists the flags.

examples:
  quire eval perplexity --text book.txt --tokens 20000
  quire eval agreement --backend cpu --against-backend torch --json
  quire eval compare my-llama my-llama-gptq my-llama-awq --text book.txt"""


def run(argv: Sequence[str]) -> int:
    return run_kind("eval", KINDS, USAGE, argv)
