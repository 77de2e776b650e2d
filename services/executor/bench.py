"""`quire bench engine`: what one executor computes without RPC, driven by plans as its scheduler would send them.

With --fit, how long steps of all shapes take instead, as a model of this machine for `quire simulate --engine`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quire.v1 import executor_pb2
from services.common import log as logs
from services.common.errors import QuireError
from services.common.flags import FlagParser
from services.executor.batch import StepLimits
from services.executor.bench_fit import blocks_needed, machine, measure_steps
from services.executor.bench_loop import BenchLoop, greedy_sequence
from services.executor.cost_model import fit
from services.executor.loader import LoadedModel, make_loader
from services.executor.model_flags import add_model_flags
from services.executor.settings import ExecutorSettings
from services.executor.warmup import warm_up


@dataclass(frozen=True, slots=True)
class Point:
    """Rates of one batch size: prompts of all sequences computed, then all decoding together."""

    batch: int
    prefill_tok_s: float
    decode_tok_s: float


def main(argv: Sequence[str]) -> int:
    """Measures each batch size; the last line of standard output is JSON. 1 where the model cannot be loaded."""
    options = _parser().parse_args(argv)
    logs.configure("bench", "warning", "text")
    most = options.max_sequences if options.fit else max(options.batch)
    blocks = max(options.batch) * -(-(options.prompt + options.output) // options.block_size)
    # Validated, not constructed: the environment of services does not count here.
    settings = ExecutorSettings.model_validate(
        {
            "model": options.model,
            "backend": options.backend,
            "dtype": options.dtype,
            "kv_format": options.kv_format,
            "instruction_set": options.instruction_set,
            "threads": options.threads,
            "block_size": options.block_size,
            "kv_blocks": blocks_needed(most, options.block_size) if options.fit else blocks,
            "max_sequences": most,
            "max_step_tokens": max(options.max_step_tokens, most),
        }
    )
    _tell(f"loading {options.model}")
    try:
        model = make_loader(settings)("", options.model)
        warm_up(model.backend, model.shape, settings.max_step_tokens, model.backend.spec.context_length)
        limits = StepLimits(settings.max_sequences, settings.max_step_tokens)
        if options.fit:
            report = _fit(model, limits, options)
        else:
            points = [_best(model, limits, batch, options) for batch in options.batch]
            report = model.describe() | {"points": [asdict(point) for point in points]}
            if not options.json:
                _print_table(model, points)
    except (QuireError, ValueError, OSError) as error:
        _tell(f"quire bench engine: {error}")
        return 1
    print(json.dumps(report), flush=True)
    return 0


def _fit(model: LoadedModel, limits: StepLimits, options: argparse.Namespace) -> dict[str, Any]:
    """Measures steps of many shapes, fits a cost model and writes it; what was written."""
    found = machine(model, fit(measure_steps(model, limits, options.repeat, _tell)), limits)
    found.write(options.fit)
    _tell(f"{options.fit}: median error {found.residuals['median_error']:.1%} of a step")
    return asdict(found)


def measure(model: LoadedModel, limits: StepLimits, batch: int, prompt: int, output: int) -> Point:
    """One run: `batch` sequences of `prompt` random tokens, `output` tokens each, greedy.

    Raises ValueError where they do not fit into the context.
    """
    if prompt + output > model.backend.spec.context_length:
        raise ValueError(f"prompt and output exceed the context of {model.backend.spec.context_length} tokens")
    loop = BenchLoop(model, limits)
    ids = range(1, batch + 1)
    started = time.perf_counter()
    loop.take(
        executor_pb2.StepPlan(
            enter=[_sequence(model, i, prompt, output) for i in ids],
            sequence_ids=ids,
            token_limits=[min(prompt, limits.tokens)] * batch,
            step_counts=[-(-prompt // limits.tokens)] * batch,
        )
    )
    _compute(loop)
    prefilled = time.perf_counter()
    loop.take(executor_pb2.StepPlan(sequence_ids=ids, token_limits=[1] * batch, step_counts=[output] * batch))
    _compute(loop)
    decoded = time.perf_counter()
    tokens = sum(len(event.token_ids) for event in loop.events if isinstance(event, executor_pb2.StepResults))
    if tokens != batch * output:
        raise ValueError(f"{tokens} tokens came instead of {batch * output}")
    return Point(
        batch=batch,
        prefill_tok_s=round(batch * prompt / (prefilled - started), 2),
        decode_tok_s=round(batch * (output - 1) / (decoded - prefilled), 2),
    )


def fastest(runs: Sequence[Point]) -> Point:
    """The best rates of some runs of one batch size: what disturbs a run only ever slows it down."""
    return Point(runs[0].batch, max(run.prefill_tok_s for run in runs), max(run.decode_tok_s for run in runs))


def _best(model: LoadedModel, limits: StepLimits, batch: int, options: argparse.Namespace) -> Point:
    """The best of some runs."""
    runs = []
    for number in range(options.repeat):
        runs.append(measure(model, limits, batch, options.prompt, options.output))
        _tell(
            f"batch {batch}, run {number + 1} of {options.repeat}: "
            f"prefill {runs[-1].prefill_tok_s:.0f} tok/s, decode {runs[-1].decode_tok_s:.1f} tok/s"
        )
    return fastest(runs)


def _compute(loop: BenchLoop) -> None:
    while loop.turn():
        pass
    loop.check()


def _sequence(model: LoadedModel, number: int, prompt: int, output: int) -> executor_pb2.SequenceState:
    draw = random.Random(number)
    ids = [draw.randrange(model.backend.spec.vocab_size) for _ in range(prompt)]
    return greedy_sequence(number, ids, prompt + output, output, model.shape.block_size)


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(prog="quire bench engine", description=__doc__)
    add_model_flags(parser)
    parser.add_argument("--threads", type=int, default=0, help="compute threads; 0 takes one per CPU")
    parser.add_argument("--batch", type=_counts, default="1,8,16,32", help="batch sizes, with commas")
    parser.add_argument("--prompt", type=_count, default=128, help="prompt tokens per sequence")
    parser.add_argument("--output", type=_at_least_two, default=64, help="output tokens per sequence")
    parser.add_argument("--block-size", type=_count, default=32, help="token slots per KV block")
    parser.add_argument("--max-step-tokens", type=_count, default=512, help="most tokens per step")
    parser.add_argument("--repeat", type=_count, default=1, help="runs per batch size; the best counts")
    parser.add_argument("--fit", type=Path, metavar="FILE", help="write a model of step times for `quire simulate`")
    parser.add_argument("--max-sequences", type=_count, default=64, help="with --fit: most sequences per step")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


def _at_least_two(text: str) -> int:
    if int(text) < 2:
        raise argparse.ArgumentTypeError("at least 2: the first token belongs to the prefill")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _print_table(model: LoadedModel, points: list[Point]) -> None:
    backend = model.backend
    print(f"{model.name}  {backend.name} {backend.dtype}  {backend.device}")
    print(f"{'batch':>6} {'prefill tok/s':>14} {'decode tok/s':>13}")
    for point in points:
        print(f"{point.batch:>6} {point.prefill_tok_s:>14.1f} {point.decode_tok_s:>13.1f}")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
