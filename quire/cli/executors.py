"""`quire executors`: what computes, and changing that while running."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence

from quire.cli.common import add_address, failures, gateway, parser
from quire.cli.plain import plain
from quire.cli.tables import align
from quire.v1 import scheduler_status_pb2, types_pb2


def run(argv: Sequence[str]) -> int:
    args = parser(
        "executors",
        "Lists the executors of the scheduler, or changes them while the services run. A change lasts until the\n"
        "scheduler ends: its settings (--executors) name those that it starts with.",
        "quire executors list\n"
        "quire executors add 10.0.0.7:50054      use an executor that runs there\n"
        "quire executors drain 10.0.0.7:50054    place nothing new there; streams go on\n"
        "quire executors remove 10.0.0.7:50054   forget it; its streams go on elsewhere",
    )
    actions = args.add_subparsers(dest="action", required=True, metavar="{list,add,drain,remove}")
    for name, what in (
        ("list", "list the executors"),
        ("add", "use an executor that runs, or use one again that was drained"),
        ("drain", "place nothing new on an executor"),
        ("remove", "forget an executor; what runs there goes on elsewhere"),
    ):
        action = actions.add_parser(name, help=what, description=what)
        if name != "list":
            action.add_argument("target", metavar="HOST:PORT", help="its address, as the scheduler reaches it")
        add_address(action)
        action.add_argument("--json", action="store_true", help="print a JSON array")
    given = args.parse_args(argv)
    with failures("executors"), gateway(given) as client:
        executors = client.executors() if given.action == "list" else client.change_executor(given.action, given.target)
        print(json.dumps([plain(executor) for executor in executors]) if given.json else _table(executors))
        for model in unserved(client.models(), executors):
            print(f"quire executors: {waits(model)}", file=sys.stderr)
    return 0


def unserved(
    models: Iterable[types_pb2.ModelDescription], executors: Iterable[scheduler_status_pb2.ExecutorStatus]
) -> list[str]:
    """Models, of those on offer, that no executor takes requests for. An alias is served where a member is."""
    taken = {executor.description.model.name for executor in executors if executor.connected and not executor.draining}
    return [model.name for model in models if taken.isdisjoint(model.members or [model.name])]


def waits(model: str) -> str:
    """What becomes of requests for a model that is unserved, and what to do."""
    return f"no executor takes requests for {model}: they wait until one does (`quire executors add HOST:PORT`)"


def _table(executors: list[scheduler_status_pb2.ExecutorStatus]) -> str:
    if not executors:
        return "no executors"
    rows = [("NUMBER", "ADDRESS", "STATE", "MODEL", "RUNNING", "TOKENS/S")]
    for executor in executors:
        model = executor.description.model.name if executor.description.HasField("model") else "none"
        speed = f"{executor.output_tokens_per_second:.0f}"
        rows.append((str(executor.number), executor.target, state(executor), model, str(executor.running_count), speed))
    return align(rows, right={0, 4, 5})


def state(executor: scheduler_status_pb2.ExecutorStatus) -> str:
    """What it is doing, in a word; more where it is slow."""
    if not executor.connected:
        return "absent"
    if executor.draining:
        return "draining" if executor.running_count else "drained"
    return f"slow ({executor.slowness_reason})" if executor.slowness_reason else "in use"
