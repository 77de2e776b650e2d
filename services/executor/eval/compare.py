"""`quire eval compare`: size, quality and speed of models beside each other."""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from services.common import log as logs
from services.common.errors import invalid
from services.common.plots import check_plot
from services.executor.batch import StepLimits
from services.executor.bench import Point, fastest
from services.executor.bench import measure as measure_speed
from services.executor.eval.bootstrap import CONFIDENCE, Interval, Resamples
from services.executor.eval.compare_table import table
from services.executor.eval.compute import STEP_TOKENS
from services.executor.eval.drawn import DRAWN_TOKENS, MOST_SEQUENCES
from services.executor.eval.options import (
    Choice,
    add_text_flags,
    base_parser,
    choose,
    draw_text,
    errors_told,
    find_frame,
    load,
    progress,
    token_count,
)
from services.executor.eval.scores import Difference, Score, differences, perplexity_interval, score
from services.executor.eval.text import reads_alike, tokenize
from services.executor.eval.windows import Frame
from services.executor.loader import LoadedModel
from services.executor.model_flags import SOURCE_HELP, add_compute_flags
from services.executor.models.checkpoint import load_spec, open_checkpoint
from services.executor.models.source import resolve
from services.executor.text_file import read_text
from services.executor.warmup import warm_up

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
SPEED_RUNS = 3

DESCRIPTION = f"""Compares models on the same text: size, perplexity, agreement with a reference, and speed.

The first model is the reference, or the one that --reference names. All see the same windows of the same tokens, as
`quire eval perplexity --help` describes them. Without --text the reference writes the text itself, {DRAWN_TOKENS:,}
tokens at temperature 1 from fixed seeds. The reference is in memory all the time and computed anew
beside each of the others, or beside --at-once of them.

bits/weight      bits on disk per parameter, embeddings and norms included
perplexity       with the interval that holds it at {CONFIDENCE:.0%}, from windows drawn again and again (bootstrap)
KL, top-1        mean divergence from the reference's predictions, and share of positions with the same likeliest token
prefill, decode  tokens per second of one sequence of {PROMPT_TOKENS} and {OUTPUT_TOKENS} tokens, best of {SPEED_RUNS}
differences      of log likelihoods, by pairs on the same windows: surer than the intervals of each alone"""

EXAMPLES = """examples:
  quire eval compare ~/models/my-llama my-llama-gptq my-llama-awq --text book.txt --context 2048 --stride 2048
  quire eval compare a.gguf b.gguf --reference ~/models/my-llama --plot compared.png
  quire eval compare smollm2 my-smollm2 --text book.txt --tokens 20000 --json"""


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 done, 1 where a model cannot be loaded or computed, 2 for a wrong flag or text."""
    options = _parser().parse_args(argv)
    logs.configure("eval", "warning", "text")
    choices = [choose(options, "MODEL", model) for model in options.models]
    if options.reference is not None:
        choices.insert(0, choose(options, "--reference", options.reference))
    with errors_told("compare"):
        if options.plot is not None:
            check_plot(options.plot)
        text = None if options.text is None else read_text("--text", options.text)
        frame = find_frame(choices, options.context, options.stride)
        _check_vocabularies(choices)
        report = {"text": None if options.text is None else Path(options.text).name} | asdict(frame)
        report |= _compare(choices, options.threads, text, options.tokens, frame, options.at_once)
        print(json.dumps(report) if options.json else table(report), flush=True)
        if options.plot is not None:
            _plot(report, options.plot)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = base_parser("compare", DESCRIPTION, EXAMPLES)
    parser.add_argument("models", nargs="+", metavar="MODEL", help=SOURCE_HELP)
    parser.add_argument("--reference", metavar="MODEL", help="what the others are compared with (default: the first)")
    add_compute_flags(parser)
    add_text_flags(parser)
    parser.add_argument(
        "--at-once",
        type=token_count,
        default=1,
        metavar="N",
        help="models in memory beside the reference: more take more memory and less time (default: 1)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw quality over size, and speed")
    return parser


def _compare(
    choices: Sequence[Choice], threads: int, text: str | None, tokens: int | None, frame: Frame, at_once: int
) -> dict[str, Any]:
    """Loads some models after the others beside the reference, the first; what was found."""
    names = _names(choices)
    room = max(frame.context, PROMPT_TOKENS + OUTPUT_TOKENS)
    reference = load(choices[0], threads, room, MOST_SEQUENCES if text is None else 1)
    passages = draw_text(reference, tokens, frame) if text is None else [tokenize(text, reference, tokens)]
    count = sum(len(passage.ids) for passage in passages)
    rows = [_describe(names[0], reference)]
    scores: list[Score] = []
    for first in range(1, len(choices), at_once):
        candidates = []
        for name, choice in list(zip(names, choices, strict=True))[first : first + at_once]:
            candidates.append(load(choice, threads, room))
            if text is not None and not reads_alike(text, tokens, passages[0], reference, candidates[-1]):
                raise invalid("MODEL", f"{choice.model} reads this text otherwise than the reference")
            rows.append(_describe(name, candidates[-1]))
        last = first + len(candidates) - 1
        with progress(f"{', '.join(names[first : last + 1])} ({last} of {len(choices) - 1})", count) as done:
            found = score([reference, *candidates], passages, frame, done)
        scores += found[len(scores) > 0 :]
        del candidates
        gc.collect()  # or the next models are loaded beside these
    if not scores:
        with progress(names[0], count) as done:
            scores = score([reference], passages, frame, done)
    return _report(rows, list(zip(names, scores, strict=True)))


def _report(rows: Sequence[dict[str, Any]], scores: Sequence[tuple[str, Score]]) -> dict[str, Any]:
    token_counts = scores[0][1].token_counts
    resamples = Resamples.of(token_counts)
    return {
        "scored": int(token_counts.sum()),
        "windows": len(token_counts),
        "models": [row | _quality(one, resamples) for row, (_, one) in zip(rows, scores, strict=True)],
        "differences": [_stated(pair) for pair in differences(scores, resamples)],
    }


def _names(choices: Sequence[Choice]) -> list[str]:
    """What the models are called: as their sources end, in full where that is not unique."""
    short = [choice.model.rstrip("/").rpartition("/")[2] for choice in choices]
    full = [choice.model for choice in choices]
    if len(set(full)) < len(full):
        raise invalid("MODEL", "one is named twice")
    return [name if short.count(name) == 1 else source for name, source in zip(short, full, strict=True)]


def _check_vocabularies(choices: Sequence[Choice]) -> None:
    """Before the work begins. Raises INVALID_FIELD where the reference, the first, predicts other tokens."""
    wanted, *sizes = (load_spec(resolve(choice.model)).vocab_size for choice in choices)
    for choice, size in zip(choices[1:], sizes, strict=True):
        if size != wanted:
            raise invalid("MODEL", f"{choice.model} has a vocabulary of {size} tokens, the reference one of {wanted}")


def _describe(name: str, model: LoadedModel) -> dict[str, Any]:
    """Size and speed."""
    byte_count = sum(path.stat().st_size for path in open_checkpoint(resolve(model.source)).files())
    speed = _speed(model)
    return model.describe() | {
        "model": name,
        "bytes": byte_count,
        "parameters": model.parameter_count,
        "bits_per_weight": 8 * byte_count / model.parameter_count,
        "prefill_tok_s": speed.prefill_tok_s,
        "decode_tok_s": speed.decode_tok_s,
    }


def _speed(model: LoadedModel) -> Point:
    """Of one sequence; a shorter one where the model's context ends before."""
    longest = model.backend.spec.context_length
    length = min(PROMPT_TOKENS + OUTPUT_TOKENS, longest)
    output = length * OUTPUT_TOKENS // (PROMPT_TOKENS + OUTPUT_TOKENS)
    warm_up(model.backend, model.shape, STEP_TOKENS, longest)
    limits = StepLimits(1, STEP_TOKENS)
    return fastest([measure_speed(model, limits, 1, length - output, output) for _ in range(SPEED_RUNS)])


def _quality(score: Score, resamples: Resamples) -> dict[str, Any]:
    fit, agreement = score.fit, score.agreement
    return {
        "nll": fit.nll,
        "perplexity": fit.perplexity,
        "perplexity_interval": _ends(perplexity_interval(score, resamples)),
        "kl_mean": None if agreement is None else agreement.kl_mean,
        "kl_p99": None if agreement is None else agreement.kl_p99,
        "top1_agreement": None if agreement is None else agreement.top1_agreement,
    }


def _stated(pair: Difference) -> dict[str, Any]:
    found = {"better": pair.better, "worse": pair.worse, "nats_per_token": pair.nats}
    return found | {"interval": _ends(pair.interval), "is_certain": pair.is_certain}


def _ends(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def _plot(report: dict[str, Any], path: Path) -> None:
    from services.executor.eval.compare_plot import draw

    try:
        draw(report, path)
    except (OSError, ValueError) as error:
        raise invalid("--plot", str(error)) from error
