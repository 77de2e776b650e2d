"""Does the engine reach the speed-up that acceptance and costs allow?

    python -m benchmarks.speculation_theory --plot docs/images/speculation-engine.png

The target is random, and all but its first layers add nothing, so a model of these alone drafts without a mistake at a
tenth of the cost; noise in its head makes it err. For drafts of length K that are each accepted with probability a, a
step gives (1 - a^(K + 1)) / (1 - a) tokens and takes as long as a step of K + 1 tokens and K of the draft model
(Leviathan et al. 2023). Both times are measured apart from the runs, whose acceptance a is. Beside fixed lengths the
scheduler's controller chooses, which is compared with the best of all lengths. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from quire.v1 import executor_pb2
from services.common.speculation import MAX_DRAFT_TOKENS
from services.executor.backends.base import Backend, KvShape
from services.executor.batch import StepLimits
from services.executor.bench_loop import BenchLoop, greedy_sequence
from services.executor.description import describe_loaded
from services.executor.loader import LoadedModel, make_loader
from services.executor.numa import PoolPlace
from services.executor.settings import ExecutorSettings
from services.executor.warmup import timed_step, warm_up
from services.scheduler.speculation.acceptance import Habit
from services.scheduler.speculation.controller import Controller, Drafting
from tests.fixtures.models import first_layers, make_rand_model

BAR = 0.9
LAYERS, DRAFT_LAYERS = 20, 2
SHAPE = {"hidden": 512, "heads": 8, "kv_heads": 2, "head_size": 64, "intermediate": 1408, "context_length": 512}
LENGTHS = (0, 2, 4, 8)
AUTO, MOST = -1, 16
"""In place of a length: what the controller chooses; the longest that it may."""
GRANT_STEPS = 4
PROMPT, OUTPUT = 8, 320
BLOCK, STEP_TOKENS = 32, 512
COST_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Point:
    """One draft, one batch, one length of drafts."""

    noise: float
    batch: int
    length: int  # AUTO where it was chosen
    acceptance: float  # of a draft whose predecessors were accepted
    speed_up: float
    possible: float


@dataclass(frozen=True, slots=True)
class _Run:
    tokens_per_second: float  # of each sequence
    acceptance: float


def make_models(folder: Path, noise: float) -> tuple[Path, Path]:
    """The target and its draft."""
    target = folder / "target"
    if not target.exists():
        make_rand_model(target, 3, layers=LAYERS, **SHAPE)
        tensors = load_file(target / "model.safetensors")
        for name, tensor in tensors.items():
            layer = int(name.split(".")[2]) if name.startswith("model.layers.") else -1
            if layer >= DRAFT_LAYERS and name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor[:] = 0.0
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    draft = first_layers(target, folder / f"draft-{noise}", DRAFT_LAYERS)
    tensors = load_file(draft / "model.safetensors")
    head = tensors["lm_head.weight"]
    head += np.random.default_rng(1).standard_normal(head.shape).astype(np.float32) * np.float32(noise * head.std())
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    return target, draft


def load(target: Path, draft: Path, batch: int) -> LoadedModel:
    blocks = batch * -(-(PROMPT + OUTPUT) // BLOCK)
    asked = {"draft": str(draft), "kv_blocks": blocks, "block_size": BLOCK, "max_sequences": batch, "dtype": "fp32"}
    return make_loader(ExecutorSettings.model_validate(asked))("target", str(target))


def enter(model: LoadedModel, batch: int) -> BenchLoop:
    """All sequences, their prompts computed."""
    loop = BenchLoop(model, StepLimits(batch, STEP_TOKENS))
    ids = list(range(1, batch + 1))
    entering = []
    for number in ids:
        prompt = np.random.default_rng(number).integers(0, 256, PROMPT).tolist()
        state = greedy_sequence(number, prompt, PROMPT + OUTPUT, OUTPUT, BLOCK)
        state.blocks.append(executor_pb2.BlockList(group_id=1, block_ids=state.blocks[0].block_ids))
        entering.append(state)
    loop.take(
        executor_pb2.StepPlan(enter=entering, sequence_ids=ids, token_limits=[PROMPT] * batch, step_counts=[1] * batch)
    )
    while loop.turn():
        pass
    loop.check()
    loop.events.clear()
    return loop


def steps(loop: BenchLoop, limits: Sequence[int], count: int) -> list[executor_pb2.StepResults]:
    """So many steps of all sequences with these draft limits, and what became of them."""
    batch = len(limits)
    loop.take(
        executor_pb2.StepPlan(
            sequence_ids=range(1, batch + 1),
            token_limits=[1] * batch,
            draft_limits=limits,
            step_counts=[count] * batch,
        )
    )
    while loop.turn():
        pass
    loop.check()
    sent = [event for event in loop.events if isinstance(event, executor_pb2.StepResults)]
    loop.events.clear()
    return sent


def run(model: LoadedModel, batch: int, length: int) -> _Run:
    """All sequences decode together, `length` drafts in each step."""
    # Half of the output at most, so that all sequences are there to the end.
    return _summed(steps(enter(model, batch), [length] * batch, OUTPUT // 2 // (length + 1)), batch)


def run_chosen(model: LoadedModel, batch: int, controller: Controller) -> _Run:
    """As the scheduler has it: drafts by what the controller says, a few steps at a time."""
    loop, habits = enter(model, batch), [Habit(MOST) for _ in range(batch)]
    all_sent: list[executor_pb2.StepResults] = []
    longest, now = 0, 0.0  # output of the sequence that has most
    while longest + GRANT_STEPS * (MOST + 1) < OUTPUT:
        grant = controller.grant(habits, [GRANT_STEPS] * batch, now)
        limits = [grant.drafts(habit) for habit in habits]
        sent = steps(loop, limits, GRANT_STEPS)
        tokens = [0] * batch
        for message in sent:
            _learn(controller, habits, limits, message)
            now += message.timings.compute_seconds + message.timings.host_seconds
            for number, count in zip(message.sequence_ids, message.token_counts, strict=True):
                tokens[number - 1] += count
        longest += max(tokens)
        all_sent += sent
    return _summed(all_sent, batch)


def _learn(
    controller: Controller, habits: Sequence[Habit], limits: Sequence[int], message: executor_pb2.StepResults
) -> None:
    """What the scheduler takes from results."""
    timings, at = message.timings, 0
    for number, count in zip(message.sequence_ids, message.draft_step_counts, strict=bool(message.draft_step_counts)):
        proposed, accepted = message.proposed_counts[at : at + count], message.accepted_counts[at : at + count]
        for asked, right in zip(proposed, accepted, strict=True):
            controller.acceptance.add(habits[number - 1], limits[number - 1], asked, right)
        at += count
    controller.observe(
        timings.step_count,
        timings.sampled_count,
        Drafting(timings.draft_step_count, timings.draft_count, timings.draft_round_count, timings.draft_seconds),
        timings.compute_seconds + timings.host_seconds,
    )


def _summed(sent: Sequence[executor_pb2.StepResults], batch: int) -> _Run:
    seconds = sum(message.timings.compute_seconds + message.timings.host_seconds for message in sent)
    pairs = [pair for message in sent for pair in zip(message.proposed_counts, message.accepted_counts, strict=True)]
    accepted = sum(right for _, right in pairs)
    refused = sum(right < proposed for proposed, right in pairs)
    tokens = sum(len(message.token_ids) for message in sent)
    return _Run(tokens / seconds / batch, accepted / (accepted + refused) if accepted else 0.0)


def step_seconds(backend: Backend, shape: KvShape, tokens: int) -> float:
    """Of the backend alone: that many tokens, one drawn after each as far as drafts of one sequence may go."""
    return timed_step(backend, shape, 0, tokens, drafts=min(tokens - 1, MAX_DRAFT_TOKENS))


def measure(folder: Path, noises: Sequence[float], batches: Sequence[int], rounds: int) -> list[Point]:
    """All lengths in turn, round by round, and between them what steps of both models take."""
    found = []
    for noise in noises:
        target, draft = make_models(folder, noise)
        for batch in batches:
            model = load(target, draft, batch)
            controller = controller_of(model)
            run_chosen(model, batch, controller)  # it learns what steps take
            runs: dict[int, list[_Run]] = {length: [] for length in (*LENGTHS, AUTO)}
            costs = Costs(model, batch)
            for _ in range(rounds):
                for length in LENGTHS:
                    runs[length].append(run(model, batch, length))
                    costs.measure()
                runs[AUTO].append(run_chosen(model, batch, controller))
            found += [_point(noise, batch, length, runs, costs) for length in runs if length]
            print("\n".join(map(_line, found[-len(LENGTHS) :])), flush=True)
    return found


def controller_of(model: LoadedModel) -> Controller:
    measured = warm_up(model.backend, model.shape, STEP_TOKENS, PROMPT + OUTPUT, model.proposer)
    limits = StepLimits(model.shape.block_count, STEP_TOKENS)
    return Controller(describe_loaded("bench", limits, model, measured, PoolPlace(0, 10)), None)


class Costs:
    """What steps of both models take, without anything else: the best of what was measured."""

    def __init__(self, model: LoadedModel, batch: int) -> None:
        assert model.draft is not None
        self._model, self._draft, self._batch = model, model.draft, batch
        self._target_seconds, self._draft_seconds = [math.inf] * (MOST + 1), math.inf

    def measure(self) -> None:
        for length, known in enumerate(self._target_seconds):
            seconds = step_seconds(self._model.backend, self._model.shape, self._batch * (length + 1))
            self._target_seconds[length] = min(known, seconds)
        for _ in range(COST_REPEATS):
            seconds = step_seconds(self._draft.backend, self._draft.shape, self._batch)
            self._draft_seconds = min(self._draft_seconds, seconds)

    def speed_up(self, acceptance: float, length: int) -> float:
        """The closed form."""
        tokens = sum(acceptance**position for position in range(length + 1))
        return tokens * self._target_seconds[0] / (self._target_seconds[length] + length * self._draft_seconds)


def _point(noise: float, batch: int, length: int, runs: dict[int, list[_Run]], costs: Costs) -> Point:
    ratios = [a.tokens_per_second / b.tokens_per_second for a, b in zip(runs[length], runs[0], strict=True)]
    # Of fixed lengths it is the same in each round, as the tokens are.
    acceptance = runs[length if length > 0 else LENGTHS[-1]][0].acceptance
    lengths = [length] if length > 0 else range(MOST + 1)
    possible = max(costs.speed_up(acceptance, length) for length in lengths)
    return Point(noise, batch, length, acceptance, statistics.median(ratios), possible)


def _line(point: Point) -> str:
    share, name = point.speed_up / point.possible, str(point.length) if point.length > 0 else "auto"
    return (
        f"noise {point.noise:<4} batch {point.batch:<3} K {name:<4} accepted {point.acceptance:.3f}"
        f"  speed-up {point.speed_up:.2f} of {point.possible:.2f} ({share:.2f})"
    )


def plot(points: Sequence[Point], path: Path) -> None:
    from matplotlib.figure import Figure

    batches = sorted({point.batch for point in points})
    figure = Figure(figsize=(5 * len(batches), 4), layout="constrained")
    for axes, batch in zip(np.atleast_1d(figure.subplots(1, len(batches), sharey=True)), batches, strict=True):
        for noise in sorted({point.noise for point in points}):
            some = [point for point in points if (point.batch, point.noise) == (batch, noise)]
            fixed = [point for point in some if point.length > 0]
            name = f"accepted {statistics.mean(point.acceptance for point in fixed):.2f}"
            lengths = [point.length for point in fixed]
            (line,) = axes.plot(lengths, [point.speed_up for point in fixed], "o-", label=name)
            axes.plot(lengths, [point.possible for point in fixed], "--", color=line.get_color())
            for point in some:
                if point.length == AUTO:
                    axes.axhline(point.speed_up, ls=":", color=line.get_color())
        axes.axhline(1.0, color="grey", linewidth=0.5)
        axes.set_title(f"{batch} at once (dashed: what acceptance and costs allow; dotted: chosen)", fontsize=9)
        axes.set_xlabel("drafts in a step")
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str]) -> int:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--noise", type=lambda text: [float(part) for part in text.split(",")], default=[0.0, 0.2, 0.6])
    top.add_argument(
        "--batch", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4], help="7 at most"
    )
    top.add_argument("--rounds", type=int, default=3)
    top.add_argument("--plot", type=Path, help="where to put a picture")
    args = top.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        points = measure(Path(folder), args.noise, args.batch, args.rounds)
    if args.plot is not None:
        plot(points, args.plot)
    print(json.dumps([asdict(point) for point in points]))
    return 0 if all(point.speed_up >= BAR * point.possible for point in points) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
