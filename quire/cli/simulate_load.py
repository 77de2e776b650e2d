"""`quire simulate`: what a load would see of schedulers, caches and executors that nobody had to buy."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from tqdm import tqdm

from quire.bench.workload import TraceScale
from quire.cli.common import Failure, failures, parser
from quire.simulation import policies
from quire.simulation.drafts import Drafts
from quire.simulation.load import Lengths, Load, Tenant, arriving, closed, recorded
from quire.simulation.measures import Targets
from quire.simulation.run import Run, simulate
from quire.simulation.service import Latencies
from quire.simulation.table import table
from quire.simulation.world import Scenario
from services.common.errors import QuireError
from services.common.plots import check_plot
from services.common.speculation import AUTO, parse_speculation
from services.executor.cost_model import Machine
from services.scheduler.settings import SchedulerSettings

DESCRIPTION = """Runs a load through the real scheduler and kvmanager in virtual time, between modelled executors, and
tells what its clients would see: throughput, latencies, what kept to targets, preemptions, waste, fairness, cost.

A load is a trace (--trace; at its own times, or with --rate at random ones), or requests of one length at random times
(--rate) or so many at a time (--concurrency). Steps take what `quire bench engine --fit FILE` measured on a machine;
without --engine, what a 135M model takes on two AVX2 cores. Equal flags and seeds give equal reports.

`quire simulate --cache-only --help` tells of the prefix cache alone, which is faster, and `quire simulate --faults
--help` of the whole stack while things go wrong."""
EXAMPLES = """
quire simulate --rate 4 --prompt-tokens 256 --output-tokens 128 --requests 1000
quire simulate --trace azure.csv --trace-lengths 0.125 --executors 4 --policy fair,fcfs,static,no-preemption
quire simulate --trace mooncake.jsonl --trace-speed 2 --engine h200.json --executors 8 --slo-ttft 2000 --slo-itl 50
quire simulate --rate 30 --tenant flood:10 --tenant light:1 --plot fairness.png
quire simulate --concurrency 4 --acceptance 0.8,0.1 --speculation auto,off,2,4,8
quire bench engine --fit mine.json && quire simulate --engine mine.json --concurrency 32 --json
"""
LEAST_RATE, MOST_RATE = 1e-5, 1e6
"""Requests a second. Services look at their clocks even where nothing comes, so a year of nothing takes long."""
NOT_SIMULATED = {"listen", "metrics_listen", "kvmanager", "executors", "policy", "aliases", "speculation"}


def run(argv: Sequence[str]) -> int:
    """Exit status: 0 done, 1 for what cannot be read, drawn or served, 2 for wrong use."""
    top = _parser()
    args = top.parse_args(argv)
    if args.trace is None and args.rate is None and args.concurrency is None:
        top.error("one of --trace, --rate and --concurrency says when requests come")
    try:
        settings = _settings(args)
    except ValidationError as error:
        problem = error.errors()[0]
        top.error(f"--{'-'.join(map(str, problem['loc'])).replace('_', '-')}: {problem['msg']}")
    with failures("simulate"):
        try:
            if args.plot:
                check_plot(args.plot)
            scenario = _scenario(args)
        except (OSError, ValueError, QuireError) as error:
            raise Failure(str(error)) from None
        ways = itertools.product(args.policy, args.speculation)
        runs = [_run(scenario, _policy(name, drafts, settings, args), args) for name, drafts in ways]
        if args.plot:
            _plot(runs, args.plot)
    found = {"load": _describe(args, scenario), "engine": scenario.machine.description}
    reports = [run.report for run in runs]
    print(json.dumps(found | {"policies": reports}) if args.json else table(reports))
    return 0


def _run(scenario: Scenario, policy: policies.Policy, args: argparse.Namespace) -> Run:
    with tqdm(desc=policy.name, total=len(scenario.load), unit="", file=sys.stderr, disable=None) as bar:
        return simulate(scenario, policy, args.dollars_per_hour, bar.update)


def _policy(name: str, drafts: str, settings: SchedulerSettings, args: argparse.Namespace) -> policies.Policy:
    """A policy with so many drafts; called after both where several are compared."""
    chosen = policies.policy(name, settings.model_copy(update={"speculation": drafts}))
    return chosen if len(args.speculation) == 1 else chosen._replace(name=f"{name}, drafts {drafts}")


def _parser() -> argparse.ArgumentParser:
    top = parser("simulate", DESCRIPTION, EXAMPLES)
    load = top.add_argument_group("load")
    load.add_argument("--trace", type=Path, metavar="FILE", help="an Azure .csv or Mooncake .jsonl")
    load.add_argument("--trace-speed", type=_positive, default=1.0, metavar="X", help="replays it X times as fast")
    load.add_argument("--trace-lengths", type=_positive, default=1.0, metavar="X", help="multiplies its lengths")
    load.add_argument("--max-prompt-tokens", type=_count, metavar="N", help="caps its prompts")
    load.add_argument("--max-output-tokens", type=_count, metavar="N", help="caps its outputs")
    moments = load.add_mutually_exclusive_group()
    moments.add_argument("--rate", type=_rate, metavar="R", help="requests a second, at random moments")
    moments.add_argument("--concurrency", type=_count, metavar="N", help="closed loop: so many requests at a time")
    load.add_argument(
        "--burstiness",
        type=_not_negative,
        default=1.0,
        metavar="X",
        help="of --rate: the gaps' coefficient of variation; 1 is Poisson, 0 regular (default: 1)",
    )
    load.add_argument("--requests", type=_count, metavar="N", help="how many (default: the trace's, else 1000)")
    load.add_argument("--prompt-tokens", type=_count, default=128, metavar="N", help="without --trace (default: 128)")
    load.add_argument("--output-tokens", type=_count, default=64, metavar="N", help="without --trace (default: 64)")
    load.add_argument(
        "--max-tokens", type=_count, metavar="N", help="what clients allow (default: what the answer will have)"
    )
    load.add_argument(
        "--tenant",
        type=_tenant,
        action="append",
        default=[],
        dest="tenants",
        metavar="NAME[:SHARE[:WEIGHT[:PRIORITY]]]",
        help="who asks, with its share of the requests; may be repeated",
    )
    load.add_argument("--seed", type=_whole, default=0, metavar="N", help="of all that is random (default: 0)")

    machines = top.add_argument_group("machines")
    machines.add_argument("--engine", type=Path, metavar="FILE", help="what `quire bench engine --fit FILE` wrote")
    machines.add_argument("--executors", type=_count, default=1, metavar="N", help="(default: 1)")
    machines.add_argument("--nodes", type=_count, default=1, metavar="N", help="NUMA nodes of each one's memory")
    machines.add_argument("--kv-blocks", type=_count, metavar="N", help="of each executor, instead of the engine's")
    machines.add_argument("--max-sequences", type=_count, metavar="N", help="that one step computes")
    machines.add_argument("--max-step-tokens", type=_count, metavar="N", help="that one step computes")
    machines.add_argument(
        "--acceptance",
        type=_acceptances,
        metavar="P[,P...]",
        help="drafts are proposed, and each accepted with such a chance; several are spread over the requests",
    )
    machines.add_argument(
        "--draft-cost",
        type=_not_negative,
        default=0.1,
        metavar="X",
        help="what a step of the draft model takes, as a part of the model's (default: %(default)s)",
    )
    usual = Latencies()
    machines.add_argument(
        "--link-ms",
        type=_not_negative,
        default=usual.link * 1000,
        metavar="MS",
        help="from one service to another (default: %(default)s)",
    )
    machines.add_argument(
        "--message-ms",
        type=_not_negative,
        default=usual.message * 1000,
        metavar="MS",
        help="a service's time for a message (default: %(default)s)",
    )
    machines.add_argument(
        "--shared-cores",
        type=_not_negative,
        default=0.0,
        metavar="X",
        help="part of that time in which executors stand still, as on one small machine (default: 0)",
    )

    scheduler = top.add_argument_group("scheduler", "--policy, and the scheduler's settings as `quire serve` has them")
    scheduler.add_argument(
        "--policy",
        type=_policies,
        default=["fair"],
        metavar="NAME[,NAME...]",
        help=f"to compare: {', '.join(policies.NAMES)} (default: fair)",
    )
    scheduler.add_argument(
        "--speculation",
        type=_speculations,
        default=[AUTO],
        metavar="K[,K...]",
        help="drafts of a step, to compare: auto, off, or a number (default: auto)",
    )
    for name, field in _settings_fields():
        scheduler.add_argument(f"--{name.replace('_', '-')}", metavar="X", help=f"{field} (default: %(default)s)")
        scheduler.set_defaults(**{name: SchedulerSettings.model_fields[name].default})

    report = top.add_argument_group("report")
    report.add_argument("--slo-ttft", type=_positive, metavar="MS", help="good answers begin within")
    report.add_argument("--slo-itl", type=_positive, metavar="MS", help="their tokens come within, on average")
    report.add_argument(
        "--window", type=_positive, default=10.0, metavar="S", help="over which fairness counts (default: 10)"
    )
    report.add_argument("--dollars-per-hour", type=_not_negative, default=0.0, metavar="D", help="of an executor")
    report.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    report.add_argument("--plot", type=Path, metavar="FILE.png", help="draw throughput, latencies and shares")
    return top


def _settings_fields() -> list[tuple[str, str]]:
    """Names and descriptions of the scheduler's own settings that decisions depend on."""
    from services.common.settings import ServiceSettings

    return [
        (name, field.description or "")
        for name, field in SchedulerSettings.model_fields.items()
        if name not in ServiceSettings.model_fields and name not in NOT_SIMULATED
    ]


def _settings(args: argparse.Namespace) -> SchedulerSettings:
    # Validated, not constructed: the environment of services does not count here.
    return SchedulerSettings.model_validate({name: getattr(args, name) for name, _ in _settings_fields()})


def _scenario(args: argparse.Namespace) -> Scenario:
    changes = {
        "block_count": args.kv_blocks,
        "max_sequences": args.max_sequences,
        "max_step_tokens": args.max_step_tokens,
    }
    machine = replace(
        Machine.read(args.engine or Path(policies.__file__).with_name("machine.json")),
        **{name: value for name, value in changes.items() if value is not None},
    )
    longest = max(0, machine.context_length - args.output_tokens)
    if args.trace is None and args.prompt_tokens > longest:
        raise Failure(
            f"--prompt-tokens: {args.prompt_tokens} is more than the {longest} that the engine's context holds"
        )
    tenants = args.tenants or [Tenant("default")]
    return Scenario(
        machine,
        _load(args, tenants),
        tenants,
        args.executors,
        args.nodes,
        max_tokens=args.max_tokens,
        latencies=Latencies(args.link_ms / 1000, args.message_ms / 1000),
        shared_cores=args.shared_cores,
        targets=Targets(_seconds(args.slo_ttft), _seconds(args.slo_itl)),
        window_seconds=args.window,
        drafts=Drafts(args.acceptance, args.draft_cost) if args.acceptance else None,
    )


def _load(args: argparse.Namespace, tenants: Sequence[Tenant]) -> Load:
    lengths = Lengths.fixed(args.prompt_tokens, args.output_tokens)
    if args.trace is not None:
        scale = TraceScale(args.trace_speed, args.trace_lengths, args.max_prompt_tokens, args.max_output_tokens)
        lengths = Lengths.trace(args.trace, scale)
    count = args.requests or (1000 if args.trace is None else len(lengths.prompts))
    if args.concurrency is not None:
        return closed(lengths, count, args.concurrency, tenants, args.seed)
    if args.rate is not None:
        return arriving(lengths, count, args.rate, args.burstiness, tenants, args.seed)
    return recorded(lengths, count, tenants, args.seed)


def _describe(args: argparse.Namespace, scenario: Scenario) -> dict[str, Any]:
    return {
        "trace": args.trace.name if args.trace else None,
        "requests": len(scenario.load),
        "rate": args.rate,
        "burstiness": args.burstiness if args.rate else None,
        "concurrency": args.concurrency,
        "seed": args.seed,
    }


def _plot(runs: Sequence[Run], path: Path) -> None:
    from quire.simulation.plot import draw

    try:
        draw(runs, path)
    except (OSError, ValueError) as error:
        raise Failure(f"--plot: {error}") from None


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _number(least: float, inclusive: bool) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = float(text)
        if not (value >= least if inclusive else value > least):
            raise argparse.ArgumentTypeError(f"{text} is {'below' if inclusive else 'not above'} {least:g}")
        return value

    return read


_positive, _not_negative = _number(0, False), _number(0, True)


def _rate(text: str) -> float:
    value = float(text)
    if not LEAST_RATE <= value <= MOST_RATE:
        raise argparse.ArgumentTypeError(f"{text} is not in {LEAST_RATE:g}..{MOST_RATE:g} a second")
    return value


def _whole(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _policies(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in policies.NAMES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(policies.NAMES)}")
    return names


def _speculations(text: str) -> list[str]:
    for part in text.split(","):
        try:
            parse_speculation(part)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return text.split(",")


def _acceptances(text: str) -> tuple[float, ...]:
    chances = tuple(map(float, text.split(",")))
    for chance in chances:
        if not 0 <= chance <= 1:
            raise argparse.ArgumentTypeError(f"{chance:g} is not in 0..1")
    return chances


def _tenant(text: str) -> Tenant:
    name, *rest = text.split(":")
    if not name or len(rest) > 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME[:SHARE[:WEIGHT[:PRIORITY]]]")
    share, weight, priority = (*rest, *("1", "1", "0")[len(rest) :])
    return Tenant(name, _positive(share), _positive(weight), int(priority))
