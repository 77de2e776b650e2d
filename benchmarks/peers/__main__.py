"""Quire beside llama.cpp, OpenVINO GenAI and vLLM on this machine's CPU.

    make bench-peers                              everything; the first time, the peers are installed: about 20 minutes
    make bench-peers PEERS="--suites engine --peers llama.cpp --rounds 5"

Prints what has to be reached and the figures behind it; every single measurement goes into a JSON file, and a plot
beside it. Nothing else should run meanwhile. Suites: engine (decode and prefill), memory (against a plain read), serve
(whole servers under load), neighbour (beside a busy process), newcomer (first token beside running requests).
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.peers import report
from benchmarks.peers.contestants import Conditions
from benchmarks.peers.lineup import FULL, PEERS, QUICK, SUITES, LineUp
from benchmarks.peers.machine import describe
from benchmarks.peers.ours import Quire
from benchmarks.peers.places import results_folder
from benchmarks.peers.processes import PeerError, unwind_on_terminate
from benchmarks.peers.samples import Record
from benchmarks.peers.suites import alternate


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 where all was measured, whatever came out; 1 where a contestant failed."""
    args = _parser().parse_args(argv)
    unwind_on_terminate()
    cpus = tuple(sorted(os.sched_getaffinity(0))[: args.threads])
    os.sched_setaffinity(0, cpus)  # and with it all that is started from here
    machine = describe() | {"threads": str(len(cpus)), "measured": _now().isoformat(timespec="seconds")}
    out: Path = args.out or results_folder() / _now().strftime("%Y%m%dT%H%M%SZ")
    out.mkdir(parents=True, exist_ok=True)
    conditions = Conditions(cpus, out, args.port)
    line_up = LineUp(conditions, Quire(conditions, args.backend, args.dtype), args.peers, QUICK if args.quick else FULL)
    record = Record()
    try:
        for name in args.suites:
            alternate(name, line_up.suite(name), args.rounds, record)
    except PeerError as error:
        print(f"bench-peers: {error}", file=sys.stderr)
        return 1
    finally:
        # What was measured before a failure is kept too.
        report.write(out, machine, " ".join(argv), record)
    print(report.text(machine, record))
    print(f"bench-peers: all of it is in {out}", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench-peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--suites", type=_names(SUITES), default=tuple(SUITES), help=f"with commas, of {', '.join(SUITES)}")
    add("--peers", type=_names(PEERS), default=PEERS, help=f"with commas, of {', '.join(PEERS)}")
    add("--rounds", type=int, default=3, help="how often every contestant is measured (default: 3)")
    add("--quick", action="store_true", help="tiny loads: shows that everything works, says nothing about speed")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPUs for everything (default: all)")
    add("--backend", default="auto", help="Quire's backend")
    add("--dtype", help="Quire's number format")
    add("--port", type=int, default=18080, help="first of a free range on 127.0.0.1 (default: 18080)")
    add("--out", type=Path, metavar="FOLDER", help="for results and logs (default: a new one in the user's cache)")
    return parser


def _names(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"no such name: {', '.join(unknown)}; there are {', '.join(known)}")
        return chosen

    return parse


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
