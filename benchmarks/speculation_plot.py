"""Speed-up by draft limit, acceptance and batch, in the simulator, as a picture and a table.

    python -m benchmarks.speculation_plot --plot docs/images/speculation.png

The machine is the one that `quire simulate` imitates, two CPU cores, and one whose steps take their time for reading
weights, as large models on GPUs have them. A draft model's step takes a tenth of the target's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quire.simulation import policies
from quire.simulation.drafts import Drafts
from quire.simulation.load import Lengths, Tenant, closed
from quire.simulation.run import simulate
from quire.simulation.world import Scenario
from services.executor.cost_model import CostModel, Machine, StepShape
from services.scheduler.settings import SchedulerSettings

PART = 0.1
"""Of a step of the target, what one of the draft takes."""
PROMPT, OUTPUT = 32, 400
LIMITS = (1, 2, 4, 8, 16)
CHANCES = (0.5, 0.7, 0.9, 0.97)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
SOLO = (Tenant("default"),)


def machines() -> dict[str, Machine]:
    cpu = Machine.read(Path(policies.__file__).with_name("machine.json"))
    memory_bound = replace(cpu, cost=CostModel(0.020, 0.0001, 0.0, 0.0001, 0.0))
    return {"two CPU cores": cpu, "bound by memory": memory_bound}


def rate(machine: Machine, chance: float, speculation: str, batch: int) -> float:
    """Output tokens per second of a closed loop."""
    load = closed(Lengths.fixed(PROMPT, OUTPUT), 2 * batch, batch, SOLO, 0)
    scenario = Scenario(machine, load, SOLO, drafts=Drafts((chance,), PART))
    settings = SchedulerSettings.model_validate({"speculation": speculation})
    found: float = simulate(scenario, policies.policy("fair", settings)).report["output_tok_s"]
    return found


def closed_form(machine: Machine, chance: float, limit: int) -> float:
    """Of one sequence in the middle of its answer (Leviathan et al. 2023), with what verifying takes."""
    context = PROMPT + OUTPUT // 2
    plain = machine.cost.seconds(StepShape(1, context, 0, 0))
    pairs = limit * context + limit * (limit + 1) // 2
    drafted = machine.cost.seconds(StepShape(1, context, limit, pairs)) + limit * PART * plain
    return (1 - chance ** (limit + 1)) / (1 - chance) * plain / drafted


def measure(machine: Machine) -> dict[str, list[list[float]]]:
    """Speed-ups: by limit for each chance, what theory says of them, and by batch for each of several limits."""
    by_limit, theory = [], []
    for chance in CHANCES:
        plain = rate(machine, chance, "off", 1)
        by_limit.append([rate(machine, chance, limit, 1) / plain for limit in (*map(str, LIMITS), "auto")])
        forms = [closed_form(machine, chance, limit) for limit in LIMITS]
        theory.append([*forms, max(closed_form(machine, chance, limit) for limit in range(17))])
    by_batch = []
    plains = [rate(machine, 0.8, "off", batch) for batch in BATCHES]
    for limit in ("2", "4", "8", "auto"):
        rates = [rate(machine, 0.8, limit, batch) for batch in BATCHES]
        by_batch.append([one / plain for one, plain in zip(rates, plains, strict=True)])
    return {"by_limit": by_limit, "theory": theory, "by_batch": by_batch}


def draw(found: dict[str, dict[str, list[list[float]]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(len(found), 2, squeeze=False)
    for (name, measured), (left, right) in zip(found.items(), axes, strict=True):
        for index, chance in enumerate(CHANCES):
            (line,) = left.plot(LIMITS, measured["by_limit"][index][:-1], "o-", label=f"{chance:.0%} accepted")
            left.plot(LIMITS, measured["theory"][index][:-1], ":", color=line.get_color())
            left.axhline(measured["by_limit"][index][-1], ls="--", lw=0.8, color=line.get_color())
        left.set(title=f"{name}: one sequence", xlabel="drafts of a step (dashed: auto, dotted: theory)")
        for limit, rates in zip(("2", "4", "8", "auto"), measured["by_batch"], strict=True):
            right.plot(BATCHES, rates, "o-", label=limit, lw=2.5 if limit == "auto" else 1.2)
        right.set(title=f"{name}: 80% accepted, by drafts of a step", xlabel="sequences at a time", xscale="log")
        right.set_xticks(BATCHES, map(str, BATCHES))
        for one in (left, right):
            one.axhline(1.0, color="gray", lw=0.8)
            one.set_ylabel("times as fast as without")
            one.set_ylim(bottom=0)
            one.grid(alpha=0.3)
            one.legend()
    figure.savefig(path, dpi=80)


def table(measured: dict[str, list[list[float]]]) -> str:
    head = "| accepted | " + " | ".join(f"K={limit}" for limit in LIMITS) + " | auto |"
    lines = [head, "|---" * (len(LIMITS) + 2) + "|"]
    for index, chance in enumerate(CHANCES):
        cells = [
            f"{one:.2f} ({one / expected:.0%})"
            for one, expected in zip(measured["by_limit"][index], measured["theory"][index], strict=True)
        ]
        lines.append(f"| {chance:.0%} | " + " | ".join(cells) + " |")
    lines += ["", "| 80% accepted | " + " | ".join(map(str, BATCHES)) + " |", "|---" * (len(BATCHES) + 1) + "|"]
    for limit, rates in zip(("K=2", "K=4", "K=8", "auto"), measured["by_batch"], strict=True):
        lines.append(f"| {limit} | " + " | ".join(f"{one:.2f}" for one in rates) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    args = parser.parse_args(argv)
    found = {name: measure(machine) for name, machine in machines().items()}
    if args.plot:
        draw(found, args.plot)
    if args.json:
        print(json.dumps(found))
    else:
        print("\n\n".join(f"{name}\n{table(measured)}" for name, measured in found.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
