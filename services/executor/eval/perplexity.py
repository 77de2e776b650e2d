"""`quire eval perplexity`: how well a model predicts a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from services.common import log as logs
from services.executor.eval.measures import Fit
from services.executor.eval.options import (
    add_kv_flags,
    base_parser,
    choose,
    errors_told,
    find_frame,
    load,
    model_line,
    progress,
    token_count,
)
from services.executor.eval.scores import score
from services.executor.eval.text import tokenize
from services.executor.eval.windows import Frame
from services.executor.loader import LoadedModel
from services.executor.model_flags import add_model_flags
from services.executor.text_file import read_text

DESCRIPTION = """Measures how well a model predicts a text: the perplexity and what it is made of.

The text is read by the model's tokenizer and seen in windows of --context tokens that begin --stride tokens apart.
Each window scores the tokens that no earlier window has scored, so each token counts once, with at least
context - stride tokens before it (fewer at the beginning of the text). Where the model's tokenizer adds a
beginning-of-text token, each window begins with one, within its --context tokens; elsewhere a token that has nothing
before it is not scored: the first of the text, and of each window where these do not overlap.
Errors are standard errors, tokens taken as independent. Bytes are those of the scored tokens in UTF-8."""

EXAMPLES = """examples:
  quire eval perplexity --text book.txt
  quire eval perplexity --text book.txt --model ~/models/my-llama --dtype fp32 --tokens 20000 --json
  quire eval perplexity --text book.txt --context 2048 --stride 2048   # windows that do not overlap
  quire eval perplexity --text book.txt --context 4096 --kv hot+warm+cold   # older keys and values in fewer bits"""


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 done, 1 where the model cannot be loaded or computed, 2 for a wrong flag or text."""
    parser = base_parser("perplexity", DESCRIPTION, EXAMPLES)
    add_model_flags(parser)
    add_kv_flags(parser)
    parser.add_argument("--text", required=True, metavar="FILE", help="the text, UTF-8")
    parser.add_argument("--tokens", type=token_count, metavar="N", help="only the first N tokens of the text")
    options = parser.parse_args(argv)
    logs.configure("eval", "warning", "text")
    with errors_told("perplexity"):
        text = read_text("--text", options.text)
        choice = choose(options, "--model", options.model)
        frame = find_frame([choice], options.context, options.stride)
        model = load(choice, options.threads, frame.context)
        passage = tokenize(text, model, options.tokens)
        with progress("scored", len(passage.ids)) as done:
            fit = score([model], [passage], frame, done)[0].fit
    kv = _kv_cost(model, frame.context)
    report = model.describe() | kv | {"text": Path(options.text).name} | asdict(frame) | asdict(fit)
    print(json.dumps(report) if options.json else _table(model, frame, fit, kv), flush=True)
    return 0


def _kv_cost(model: LoadedModel, length: int) -> dict[str, Any]:
    """The policy, and bytes of a sequence of so many tokens: under it, and all hot."""
    shape = model.shape
    sizes = [shape.block_bytes, *(pool.block_bytes for pool in shape.colder)]
    counts = model.policy.counts(shape.block_size, length)
    return {
        "kv_policy": str(model.policy),
        "kv_bytes": sum(count * size for count, size in zip(counts, sizes, strict=True)),
        "kv_bytes_hot": sum(counts) * shape.block_bytes,
    }


def _table(model: LoadedModel, frame: Frame, fit: Fit, kv: dict[str, Any]) -> str:
    lines = [
        model_line(model),
        f"{fit.scored:,} tokens scored, in windows of {frame.context} that begin {frame.stride} apart",
        f"mean negative log likelihood  {fit.nll:9.4f} ± {fit.nll_error:.4f} nats per token",
        f"perplexity                    {fit.perplexity:9.4f} ± {fit.perplexity * fit.nll_error:.4f}",
    ]
    if kv["kv_policy"]:
        share = kv["kv_bytes"] / kv["kv_bytes_hot"]
        lines.append(f"KV of a window                {kv['kv_bytes'] / 2**20:9.2f} MiB, {share:.3f} of all hot")
    if fit.bits_per_byte is not None:
        lines.append(f"bits per byte                 {fit.bits_per_byte:9.4f}")
    return "\n".join(lines)
