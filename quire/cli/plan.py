"""`quire plan`: what of a model fits into a memory, without its weights at hand."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quire.cli.capacity import BLOCK_SIZE, Fit, fits
from quire.cli.common import Failure, failures, parser
from quire.cli.tables import align
from services.common.errors import QuireError
from services.common.kv_policy import NAMES
from services.common.sizes import format_size, parse_size
from services.executor.kv_bytes import token_bytes
from services.executor.models.outline import Outline, Weights, read_outline
from services.executor.models.parameters import GROUPED_BYTES

EXAMPLES = """
quire plan --model ~/models/Llama-3.1-70B/config.json --memory 160GiB --context 8192
quire plan --model smollm2 --memory 2GiB --kv hot+warm+cold
quire plan --model model-q4.gguf --memory 24GiB --json"""


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for and what came of it. Sizes are bytes."""

    model: str
    outline: Outline
    dtype: str | None  # of the weights; None where they are counted as stored in a format without a name
    weight_bytes: int
    memory: int
    context: int
    kv_format: str  # of hot blocks
    formats: list[Fit]
    policies: list[Fit]
    chosen: Fit
    notes: tuple[str, ...]

    @property
    def kv_memory(self) -> int:
        """What the weights leave."""
        return max(self.memory - self.weight_bytes, 0)


def run(argv: Sequence[str]) -> int:
    args = _parser()
    given = args.parse_args(argv)
    with failures("plan"):
        plan = make_plan(given)
    print(json.dumps(as_json(plan), indent=2) if given.json else as_text(plan))
    if plan.chosen.sequence_count:
        return 0
    print(f"quire plan: {what_would_fit(plan)}", file=sys.stderr)
    return 1


def make_plan(given: argparse.Namespace) -> Plan:
    """The plan for checked flags. Raises Failure."""
    try:
        outline = read_outline(given.model)
    except QuireError as error:
        raise Failure(error.message) from error
    weights, kv, notes = outline.weights, outline.kv, outline.notes
    context = given.context or outline.context_length
    if context is None:
        raise Failure("--context: the model states none of its own; say how many tokens")
    if outline.context_length is not None and context > outline.context_length:
        notes += (f"--context {context:,} is beyond the model's own {outline.context_length:,} tokens",)
    if kv != kv.padded():
        stored = kv.padded().key_size
        notes += (f"heads of {kv.key_size} are stored as {stored}: blocks count them so, kv_bytes_per_token does not",)
    dtype = weights.dtype if given.dtype == "auto" else given.dtype
    weight_bytes = _weight_bytes(weights, given.dtype)
    kv_format = given.kv_format if given.kv_format != "auto" else "fp32" if dtype == "fp32" else "bf16"
    formats, policies = fits(kv, kv_format, max(given.memory - weight_bytes, 0), context)
    return Plan(
        model=given.model,
        outline=outline,
        dtype=dtype,
        weight_bytes=weight_bytes,
        memory=given.memory,
        context=context,
        kv_format=kv_format,
        formats=formats,
        policies=policies,
        chosen=policies[NAMES.index(given.kv)],
        notes=notes,
    )


def _weight_bytes(weights: Weights, dtype: str) -> int:
    """As stored, or converted to a format."""
    if dtype in ("auto", weights.dtype) and weights.stored_bytes is not None:
        return weights.stored_bytes
    format_ = weights.dtype if dtype == "auto" else dtype
    if format_ is None:
        raise Failure(f"--dtype: the config states no known format; choose one of {', '.join(GROUPED_BYTES)}")
    return weights.parameters.size(format_)


def what_would_fit(plan: Plan) -> str:
    """Why not even one sequence fits, and what does."""
    most, weights = plan.chosen.most_sequence_bytes, plan.outline.weights
    needed = f"at least {format_size(plan.weight_bytes + most)} are needed"
    if plan.kv_memory and plan.chosen.longest_context:
        return (
            f"--memory {format_size(plan.memory)}: no sequence of {plan.context:,} tokens fits, but one of "
            f"{plan.chosen.longest_context:,} does; {needed} for the former"
        )
    smaller = [name for name in GROUPED_BYTES if weights.parameters.size(name) + most <= plan.memory]
    advice = f"; with --dtype {' or '.join(smaller)} it would fit" if smaller else ""
    return (
        f"--memory {format_size(plan.memory)}: the weights take {format_size(plan.weight_bytes)}, a sequence of "
        f"{plan.context:,} tokens {format_size(most)}: {needed}{advice}"
    )


def as_json(plan: Plan) -> dict[str, Any]:
    outline, kv = plan.outline, plan.outline.kv
    return {
        "model": plan.model,
        "architecture": outline.architecture,
        "layer_count": kv.layer_count,
        "head_count": outline.head_count,
        "kv_head_count": kv.kv_head_count,
        "key_size": kv.key_size,
        "value_size": kv.value_size,
        "model_context": outline.context_length,
        "weights": {
            "parameter_count": outline.weights.parameters.total,
            "exact": outline.weights.is_exact,
            "dtype": plan.dtype,
            "bytes": plan.weight_bytes,
            "counted_from": outline.weights.source,
        },
        "memory_bytes": plan.memory,
        "kv_memory_bytes": plan.kv_memory,
        "context": plan.context,
        "block_size": BLOCK_SIZE,
        "kv": plan.chosen.name,
        "kv_policy": str(plan.chosen.policy),
        "kv_format": plan.kv_format,
        "kv_bytes_per_token": token_bytes(kv, plan.kv_format),
        "fits": plan.chosen.sequence_count > 0,
        "sequences": plan.chosen.sequence_count,
        "tokens": plan.chosen.token_count,
        "longest_context": plan.chosen.longest_context,
        "formats": [_fit_json(fit) for fit in plan.formats],
        "policies": [_fit_json(fit) for fit in plan.policies],
        "notes": list(plan.notes),
    }


def _fit_json(fit: Fit) -> dict[str, Any]:
    return asdict(fit) | {"policy": str(fit.policy), "saved": round(fit.saved, 4)}


def as_text(plan: Plan) -> str:
    outline, kv, weights = plan.outline, plan.outline.kv, plan.outline.weights
    context = "" if outline.context_length is None else f", context {outline.context_length:,}"
    about = "" if weights.is_exact else "about "
    heads = f"{kv.kv_head_count} KV heads of {kv.key_size} for {outline.head_count} query heads"
    dtype = plan.dtype or "the files' own format"
    counted = f"{about}{weights.parameters.total:,} in {dtype}: {format_size(plan.weight_bytes)}"
    token = f"{token_bytes(kv, plan.kv_format):,} bytes per token in {plan.kv_format}"
    facts = [
        ("model", f"{outline.architecture}, {kv.layer_count} layers, {heads}{context}"),
        ("weights", f"{counted} (from {weights.source})"),
        ("memory", f"{format_size(plan.memory)}, of which {format_size(plan.kv_memory)} are left for KV"),
        ("KV", f"{token}, blocks of {BLOCK_SIZE} tokens"),
        ("fits", f"{plan.chosen.sequence_count:,} sequences of {plan.context:,} tokens with --kv {plan.chosen.name}"),
    ]
    rows = [("KV", "BLOCK", "BYTES/TOKEN", "SEQUENCE", "SEQUENCES", "TOKENS", "SAVES")]
    for fit in [*plan.formats, *plan.policies]:
        rows.append(
            (
                fit.name,
                format_size(fit.pools[0].block_bytes) if len(fit.pools) == 1 else "mixed",
                f"{fit.bytes_per_token:,.0f}",
                format_size(fit.sequence_bytes),
                f"{fit.sequence_count:,}",
                f"{fit.token_count:,}",
                f"{fit.saved:.0%}" if fit.saved else "",
            )
        )
    notes = [f"note: {note}" for note in plan.notes]
    return "\n".join([align(facts), "", align(rows, right=range(1, 7)), *([""] if notes else []), *notes])


def _parser() -> argparse.ArgumentParser:
    args = parser("plan", "Says how much of a model and its KV fits into a memory. No weights are needed.", EXAMPLES)
    add = args.add_argument
    add(
        "--model",
        required=True,
        help="a folder or config.json in Hugging Face's layout, a .gguf file, a catalogue name, or a hub id, of which "
        "only the config is fetched",
    )
    add("--memory", required=True, type=_memory, metavar="SIZE", help="for weights and KV, such as 80GiB")
    add("--context", type=_tokens, metavar="TOKENS", help="prompt plus output of a sequence (default: the model's own)")
    add("--kv", choices=NAMES, default="hot", help="formats of KV by age that the answer is for (default: hot)")
    add(
        "--dtype",
        choices=("auto", *GROUPED_BYTES),
        default="auto",
        help="number format of weights (default: auto, as they are stored)",
    )
    add(
        "--kv-format",
        choices=("auto", "fp32", "bf16", "fp16"),
        default="auto",
        help="number format of hot KV (default: auto, fp32 beside fp32 weights, else bf16)",
    )
    add("--json", action="store_true", help="print a JSON object; sizes are bytes")
    return args


def _memory(text: str) -> int:
    try:
        value = parse_size(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 80GiB") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _tokens(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens above 0")
    return int(text)
