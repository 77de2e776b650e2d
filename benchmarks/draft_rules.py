"""How often is a draft accepted: drawn with its target's noise and compared, or by the rejection rule?

    python -m benchmarks.draft_rules --target smollm2 --drafts early-exit:10,early-exit:20,path/to/smaller --text FILE

Both rules give the target's distribution. Of each position of a text, the models' probabilities p (target) and q
(draft) give the chance of either, exactly: the shared noise makes both choose token x with probability
1 / sum_y max(p_y / p_x, q_y / q_x) (Daliri et al. 2025), the rejection rule accepts with sum_x min(p_x, q_x), the most
that any rule can (Leviathan et al. 2023).
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from services.executor.backends.base import SampleRow, SamplingRule
from services.executor.eval.compute import inputs_for
from services.executor.loader import LoadedModel, make_loader
from services.executor.sampling.draw import probabilities
from services.executor.settings import ExecutorSettings
from services.executor.speculation.setting import DraftSetting, parse_draft

WINDOW, UNSCORED = 256, 64
"""Tokens of a window, and those at its beginning that are only read."""
MATTERS = 1e-9
"""Tokens less likely than this are drawn by neither."""

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Found:
    """Of one draft under one rule of sampling: how likely a draft is accepted, on average over all positions."""

    draft: str
    temperature: float
    top_p: float
    shared_noise: float
    rejection: float

    @property
    def gain(self) -> float:
        """Of rejection over shared noise."""
        return self.rejection / self.shared_noise - 1


def shared_noise(p: Float64, q: Float64) -> float:
    """How likely exponential races over p and over q [V], each a distribution, with one noise have the same winner."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(q > 0, p / q, np.inf)
    order = np.argsort(ratio, kind="stable")
    sorted_p, sorted_q = p[order], q[order]
    # The greater of p_y / p_x and q_y / q_x is the former where y's ratio is no less than x's.
    above = np.cumsum(sorted_p[::-1])[::-1]
    below = np.cumsum(sorted_q) - sorted_q
    both = (sorted_p > MATTERS) & (sorted_q > MATTERS)
    return float((1.0 / (above[both] / sorted_p[both] + below[both] / sorted_q[both])).sum())


def rejection(p: Float64, q: Float64) -> float:
    return float(np.minimum(p, q).sum())


def logits(model: LoadedModel, tokens: Sequence[int], layers: int) -> NDArray[np.float32]:
    """After each token from UNSCORED on, [R, V]; by the first `layers` layers, 0 for all."""
    inputs = replace(inputs_for(model, [tokens], 0), layers=layers)
    return model.backend.logits(inputs, range(UNSCORED, len(tokens)))


def windows(model: LoadedModel, text: str, positions: int) -> Iterator[list[int]]:
    """Tokens of a text, a window at a time, that have so many scored positions together."""
    with zipfile.ZipFile(io.BytesIO(model.tokenizer_bundle)) as files:
        tokenizer = Tokenizer.from_str(files.read("tokenizer.json").decode())
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    for at in range(0, len(ids), WINDOW):
        if positions <= 0 or len(ids) - at <= UNSCORED:
            return
        window = ids[at : at + min(WINDOW, UNSCORED + positions)]
        positions -= len(window) - UNSCORED
        yield window


def measure(args: argparse.Namespace) -> list[Found]:
    target = _load(args.target, args)
    drafts = args.drafts
    models = {name: _load(draft.model, args) if draft.model else target for name, draft in drafts.items()}
    rules = [
        SamplingRule(temperature=temperature, top_p=top_p) for temperature in args.temperatures for top_p in args.top_p
    ]
    sums = {(name, rule): np.zeros(2) for name in drafts for rule in range(len(rules))}
    count = 0
    for tokens in windows(target, args.text.read_text(), args.positions):
        wanted = [_distributions(logits(target, tokens, 0), rule) for rule in rules]
        count += len(tokens) - UNSCORED
        for name, draft in drafts.items():
            drafted = logits(models[name], tokens, draft.layers or 0)
            for number, rule in enumerate(rules):
                for p, q in zip(wanted[number], _distributions(drafted, rule), strict=True):
                    sums[name, number] += shared_noise(p, q), rejection(p, q)
        print(f"{count} positions", file=sys.stderr, flush=True)
    return [
        Found(name, rules[number].temperature, rules[number].top_p, *(sums[name, number] / count).tolist())
        for name, number in sums
    ]


def _distributions(rows: NDArray[np.float32], rule: SamplingRule) -> list[Float64]:
    return [probabilities(row, SampleRow(0, rule, [], [])) for row in rows]


def _load(source: str, args: argparse.Namespace) -> LoadedModel:
    settings = {"model": source, "backend": "torch", "dtype": "fp32", "threads": args.threads, "max_sequences": 1}
    blocks = -(-WINDOW // ExecutorSettings.model_fields["block_size"].default)
    return make_loader(ExecutorSettings.model_validate(settings | {"kv_blocks": blocks}))("", source)


def main(argv: Sequence[str]) -> int:
    def listed(text: str) -> dict[str, DraftSetting]:
        drafts = {name: parse_draft(name) for name in text.split(",")}
        if wrong := [name for name, draft in drafts.items() if draft.model is None and draft.layers is None]:
            raise argparse.ArgumentTypeError(f"{wrong[0]} is neither a model nor early-exit:LAYERS")
        return drafts

    def numbers(text: str) -> list[float]:
        return [float(part) for part in text.split(",")]

    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--target", default="smollm2")
    top.add_argument("--drafts", type=listed, default="early-exit:20,early-exit:24,early-exit:27")
    top.add_argument("--text", type=Path, required=True, help="a file of text as the target would write it")
    top.add_argument("--positions", type=int, default=512)
    top.add_argument("--temperatures", type=numbers, default=[0.7, 1.0])
    top.add_argument("--top-p", type=numbers, default=[1.0, 0.95])
    top.add_argument("--threads", type=int, default=2)
    args = top.parse_args(argv)
    found = measure(args)
    print(f"{'draft':<30}{'temperature':>12}{'top-p':>7}{'shared noise':>14}{'rejection':>11}{'gain':>8}")
    for one in found:
        name = Path(one.draft).name
        print(
            f"{name:<30}{one.temperature:>12}{one.top_p:>7}{one.shared_noise:>14.3f}{one.rejection:>11.3f}"
            f"{one.gain:>8.1%}"
        )
    print(json.dumps({"target": args.target, "positions": args.positions, "found": [asdict(one) for one in found]}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
