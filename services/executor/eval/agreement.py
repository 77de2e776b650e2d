"""`quire eval agreement`: how far a model's predictions are from those of a reference."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from services.common import log as logs
from services.common.errors import invalid
from services.executor.eval.compute import score_text
from services.executor.eval.drawn import DRAWN_TOKENS, MOST_SEQUENCES
from services.executor.eval.measures import Agreement, Distance, compare, summarize_agreement
from services.executor.eval.options import (
    Choice,
    add_text_flags,
    base_parser,
    choose,
    draw_text,
    errors_told,
    find_frame,
    load,
    model_line,
    progress,
)
from services.executor.eval.text import Passage, reads_alike, tokenize
from services.executor.eval.windows import Frame
from services.executor.loader import LoadedModel
from services.executor.model_flags import BACKENDS, DTYPES, INSTRUCTION_SETS, KV_FORMATS, add_model_flags
from services.executor.text_file import read_text

DESCRIPTION = f"""Compares a model's predictions with those of a reference, token by token.

The plain flags name the candidate, those that begin with --against the reference, which takes what is not given from
the candidate. Both compute the same windows of the same tokens, as `quire eval perplexity --help` describes them.
Without --text the reference writes the text itself, {DRAWN_TOKENS:,} tokens at temperature 1 from fixed seeds.

top-1 agreement  share of positions where both find the same token likeliest
KL               divergence of the candidate's next-token distribution from the reference's, KL(reference || candidate)
logit error      |candidate - reference| / |reference| of the raw logits at a position, L2 norms"""

EXAMPLES = """examples:
  quire eval agreement --backend cpu --against-backend torch --against-dtype fp32
  quire eval agreement --model model-q4.gguf --against-model ~/models/my-llama --text book.txt --tokens 20000 --json"""


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 done, 1 where a model cannot be loaded or computed, 2 for a wrong flag or text."""
    parser = base_parser("agreement", DESCRIPTION, EXAMPLES)
    add_model_flags(parser)
    parser.add_argument("--against-model", metavar="MODEL", help="the reference's model")
    parser.add_argument("--against-backend", choices=BACKENDS, help="what computes the reference")
    parser.add_argument("--against-dtype", choices=DTYPES, help="the reference's number format of weights")
    parser.add_argument("--against-kv-format", choices=KV_FORMATS, help="its number format of keys and values")
    parser.add_argument("--against-instruction-set", choices=INSTRUCTION_SETS, help="what it uses of this CPU")
    add_text_flags(parser)
    options = parser.parse_args(argv)
    if not any(value for name, value in vars(options).items() if name.startswith("against_")):
        parser.error("name the reference with --against-model, --against-backend or another --against flag")
    logs.configure("eval", "warning", "text")
    wanted, against = choose(options, "--model", options.model), _reference(options)
    with errors_told("agreement"):
        text = None if options.text is None else read_text("--text", options.text)
        frame = find_frame([wanted, against], options.context, options.stride)
        reference = load(against, options.threads, frame.context, MOST_SEQUENCES if text is None else 1)
        candidate = load(wanted, options.threads, frame.context)
        _check_vocabularies(reference, candidate)
        if text is None:
            passages = draw_text(reference, options.tokens, frame)
        else:
            passages = [_tokenize(text, reference, candidate, options.tokens)]
        with progress("compared", sum(len(passage.ids) for passage in passages)) as done:
            found = measure(reference, candidate, passages, frame, done)
    report = {
        "reference": reference.describe(),
        "candidate": candidate.describe(),
        "text": None if options.text is None else Path(options.text).name,
    }
    print(json.dumps(report | asdict(frame) | asdict(found)) if options.json else _table(reference, candidate, found))
    return 0


def measure(
    reference: LoadedModel,
    candidate: LoadedModel,
    passages: Sequence[Passage],
    frame: Frame,
    compared: Callable[[int], object],
) -> Agreement:
    """Compares both on all scored tokens; `compared` hears of tokens as they are done. Raises NOT_FINITE."""
    parts: list[Distance] = []
    for part in score_text([reference, candidate], passages, frame):
        parts += compare(part.logits, part.targets)[1]
        compared(len(part.targets))
    return summarize_agreement(parts)


def _reference(options: argparse.Namespace) -> Choice:
    """The flags that begin with --against; what is not given is the candidate's, where the backend can have it."""
    backend = options.against_backend or options.backend
    inherited_set = "auto" if backend in ("torch", "cuda") else options.instruction_set
    return Choice(
        "--against-model" if options.against_model else "--model",
        options.against_model or options.model,
        backend,
        options.against_dtype or options.dtype,
        options.against_kv_format or options.kv_format,
        options.against_instruction_set or inherited_set,
    )


def _check_vocabularies(reference: LoadedModel, candidate: LoadedModel) -> None:
    wanted, found = reference.backend.spec.vocab_size, candidate.backend.spec.vocab_size
    if wanted != found:
        raise invalid("--against-model", f"its vocabulary has {wanted} tokens, that of {candidate.name} has {found}")


def _tokenize(text: str, reference: LoadedModel, candidate: LoadedModel, limit: int | None) -> Passage:
    passage = tokenize(text, reference, limit)
    if not reads_alike(text, limit, passage, reference, candidate):
        raise invalid("--against-model", f"its tokenizer reads this text otherwise than that of {candidate.name}")
    return passage


def _table(reference: LoadedModel, candidate: LoadedModel, found: Agreement) -> str:
    return "\n".join(
        [
            f"reference  {model_line(reference)}",
            f"candidate  {model_line(candidate)}",
            f"{found.positions:,} positions",
            f"top-1 agreement  {found.top1_agreement:10.2%}",
            f"KL, nats         {found.kl_mean:10.3e} mean    {found.kl_p99:10.3e} 99th percentile",
            f"logit error      {found.logit_error_median:10.3e} median  {found.logit_error_max:10.3e} largest",
        ]
    )
