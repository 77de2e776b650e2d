"""What the evaluations share: flags, the text, loaded models, and errors in one line that name the flag."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from pydantic import ValidationError
from tqdm import tqdm

from services.common.errors import QuireError, Reason, invalid
from services.common.flags import FlagParser
from services.common.kv_policy import NAMES
from services.executor.eval.compute import STEP_TOKENS
from services.executor.eval.drawn import DRAWN_TOKENS, draw_passages
from services.executor.eval.text import Passage
from services.executor.eval.windows import Frame
from services.executor.loader import LoadedModel, make_loader
from services.executor.models.checkpoint import load_spec
from services.executor.models.source import resolve
from services.executor.settings import ExecutorSettings

DEFAULT_CONTEXT = 512
BLOCK_SIZE = 32
_KV_SETTINGS = ("kv", "kv_hot_tokens", "kv_warm_tokens")


@dataclass(frozen=True, slots=True)
class Choice:
    """A model to load, and the flag that named it."""

    flag: str
    model: str
    backend: str
    dtype: str
    kv_format: str = "auto"
    instruction_set: str = "auto"
    kv: Mapping[str, str | int] = field(default_factory=dict)  # settings of KV formats by age that were given


def base_parser(kind: str, description: str, examples: str) -> argparse.ArgumentParser:
    """A parser with the flags that all evaluations take beside those of models; its help ends with examples."""
    parser = FlagParser(prog=f"quire eval {kind}", description=description, epilog=examples)
    parser.add_argument("--threads", type=_natural, default=0, metavar="N", help="compute threads; 0 takes one per CPU")
    parser.add_argument(
        "--context", type=_at_least_two, metavar="N", help=f"tokens per window (default: {DEFAULT_CONTEXT})"
    )
    parser.add_argument(
        "--stride", type=token_count, metavar="N", help="tokens between windows (default: half the context)"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    return parser


def add_kv_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --kv and its windows; what is not given stays as an executor has it."""
    fields = ExecutorSettings.model_fields
    parser.add_argument("--kv", choices=NAMES, help=fields["kv"].description)
    for name in _KV_SETTINGS[1:]:
        described = f"{fields[name].description} (default: {fields[name].default})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=token_count, metavar="N", help=described)


def add_text_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --text and --tokens, for evaluations that need no text."""
    parser.add_argument("--text", metavar="FILE", help="a text, UTF-8, instead of the reference's own")
    parser.add_argument(
        "--tokens", type=token_count, metavar="N", help=f"only the first N tokens of the text (its own: {DRAWN_TOKENS})"
    )


def choose(options: argparse.Namespace, flag: str, model: str) -> Choice:
    """A model, computed as the flags of `add_compute_flags` say."""
    chosen = (model, options.backend, options.dtype, options.kv_format, options.instruction_set)
    given = {name: value for name in _KV_SETTINGS if (value := getattr(options, name, None)) is not None}
    return Choice(flag, *chosen, given)


def find_frame(choices: list[Choice], context: int | None, stride: int | None) -> Frame:
    """The windows that all models take. Raises INVALID_FIELD where one does not, or where tokens would be skipped."""
    longest = min(_longest(choice) for choice in choices)
    if context is not None and context > longest:
        raise invalid("--context", f"{context} is beyond the {longest} tokens that the model takes")
    context = context or min(DEFAULT_CONTEXT, longest)
    if stride is not None and stride > context:
        raise invalid("--stride", f"{stride} would skip tokens; at most the context, {context}")
    return Frame(context, stride or max(context // 2, 1))


def load(choice: Choice, threads: int, context: int, sequences: int = 1) -> LoadedModel:
    """The model, with KV for so many sequences of `context` tokens in each format.

    Raises the loader's errors after the flag, and INVALID_FIELD for windows of formats that contradict each other.
    """
    # Validated, not constructed: the environment of services does not count here.
    try:
        settings = ExecutorSettings.model_validate(
            {
                "model": choice.model,
                "backend": choice.backend,
                "dtype": choice.dtype,
                "kv_format": choice.kv_format,
                "instruction_set": choice.instruction_set,
                "threads": threads,
                "block_size": BLOCK_SIZE,
                "kv_blocks": sequences * -(-context // BLOCK_SIZE),
                "max_sequences": sequences,
                "max_step_tokens": STEP_TOKENS,
                **choice.kv,
            }
        )
    except ValidationError as error:
        problem = error.errors()[0]
        message = problem["msg"].removeprefix("Value error, ")  # names its field where `loc` does not
        named, _, said = (f"{problem['loc'][0]}: {message}" if problem["loc"] else message).partition(": ")
        raise invalid(f"--{named.replace('_', '-')}", said) from error
    tell(f"loading {choice.model}")
    with _naming(choice.flag):
        return make_loader(settings)("", choice.model)


def model_line(model: LoadedModel) -> str:
    """What computes, for people."""
    return "{model}  {backend} {dtype}, KV {kv_format}  {device}".format_map(model.describe())


def draw_text(reference: LoadedModel, tokens: int | None, frame: Frame) -> list[Passage]:
    """The reference's own text, of DRAWN_TOKENS where no number is given. Raises NOT_FINITE."""
    count = tokens or DRAWN_TOKENS
    with progress("written", count) as done:
        return draw_passages(reference, count, frame.context - 1, done)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], object]]:
    """A bar of tokens on standard error, where that is a terminal; call what it gives with tokens done."""
    with tqdm(desc=what, total=total, unit="tok", file=sys.stderr, disable=None) as bar:
        yield bar.update


@contextmanager
def errors_told(kind: str) -> Iterator[None]:
    """Prints an error as `quire eval KIND: ...`; ends with status 2 for a wrong flag, else 1."""
    try:
        yield
    except QuireError as error:
        tell(f"quire eval {kind}: {error}")
        raise SystemExit(2 if error.reason is Reason.INVALID_FIELD else 1) from None


def token_count(text: str) -> int:
    """A flag's value of at least 1."""
    return _least(text, 1)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _longest(choice: Choice) -> int:
    with _naming(choice.flag):
        return load_spec(resolve(choice.model)).context_length


@contextmanager
def _naming(flag: str) -> Iterator[None]:
    try:
        yield
    except QuireError as error:
        raise QuireError(error.reason, f"{flag}: {error}") from error


def _natural(text: str) -> int:
    return _least(text, 0)


def _at_least_two(text: str) -> int:
    return _least(text, 2)


def _least(text: str, least: int) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is less than {least}")
    return value
