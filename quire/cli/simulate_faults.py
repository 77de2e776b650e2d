"""`quire simulate --faults`: the real cores of all services, and what goes wrong around them, from seeds."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence

from tqdm import tqdm

from quire.cli.common import parser
from quire.simulation.faults.run import Result, play_all

DESCRIPTION = """Plays small random scenarios through the real scheduler, kvmanager, executor and gateway cores in
virtual time. Processes die and come back, streams break and lose messages, messages come late, parties stand still,
executors slow down, clocks jump. After every event the books are checked; at the end, that every token came once, in
its place and equal to what the request gives alone, that every request ended once and for a good reason, and that
nothing is held any more.

A seed is a whole scenario: one that fails is shown with its last events, and fails in the same way again."""
EXAMPLES = """
quire simulate --faults --seeds 1000 --processes 2
quire simulate --faults --first 178 --seeds 1"""
MOST_SHOWN = 5
LINE_CHARACTERS = 300


def run(argv: Sequence[str]) -> int:
    """Exit status: 0 where every seed held, 1 where one did not, 2 for wrong use."""
    args = parser("simulate --faults", DESCRIPTION, EXAMPLES)
    args.add_argument("--faults", action="store_true", required=True, help="this kind of simulation")
    args.add_argument("--seeds", type=int, default=100, metavar="N", help="how many (default: 100)")
    args.add_argument("--first", type=int, default=0, metavar="SEED", help="the first one (default: 0)")
    args.add_argument("--processes", type=int, default=1, metavar="N", help="how many play at a time (default: 1)")
    args.add_argument("--json", action="store_true", help="print a JSON object")
    given = args.parse_args(argv)
    for name, least in (("seeds", 1), ("first", 0), ("processes", 1)):
        if getattr(given, name) < least:
            args.error(f"--{name}: at least {least}")
    started, outcomes, failed = time.monotonic(), Counter[str](), list[Result]()
    results = play_all(given.first, given.seeds, given.processes)
    for result in tqdm(results, total=given.seeds, unit=" seeds", disable=None):
        outcomes += result.outcomes
        if result.failure:
            failed.append(result)
    seconds = time.monotonic() - started
    if given.json:
        failures = [{"seed": one.seed, "failure": one.failure, "tail": one.tail} for one in failed]
        print(json.dumps({"seeds": given.seeds, "seconds": seconds, "outcomes": outcomes, "failures": failures}))
    else:
        for result in failed[:MOST_SHOWN]:
            print(_tell(result))
        ends = ", ".join(f"{count} {name}" for name, count in outcomes.most_common())
        print(f"{given.seeds} seeds in {seconds:.0f} s, {len(failed)} failed; requests by their end: {ends}")
    return 1 if failed else 0


def _tell(result: Result) -> str:
    tail = "\n".join(f"  {line[:LINE_CHARACTERS]}" for line in result.tail)
    again = f"quire simulate --faults --first {result.seed} --seeds 1"
    return f"{tail}\nseed {result.seed}: {result.failure}\n  again: {again}\n"
