"""`quire models`: which models are served, and changing them while running."""

from __future__ import annotations

import json
from collections.abc import Sequence

from quire.cli.common import Failure, add_address, failures, gateway, parser
from quire.cli.plain import plain
from quire.cli.tables import align
from quire.supervisor.options import parse_model
from quire.v1 import types_pb2


def run(argv: Sequence[str]) -> int:
    args = parser(
        "models",
        "Lists the models that can be asked for, or changes them while the services run.",
        "quire models list\n"
        "quire models load mine=~/models/my-llama     into an executor that holds none\n"
        "quire models reload mine                     read the weights again\n"
        "quire models unload mine",
    )
    actions = args.add_subparsers(dest="action", required=True, metavar="{list,load,unload,reload}")
    for name, argument, what in (
        ("list", None, "list the models"),
        ("load", "NAME=SOURCE", "load a model into a free executor"),
        ("unload", "NAME", "remove a model from every executor"),
        ("reload", "NAME[=SOURCE]", "read a model's weights again"),
    ):
        action = actions.add_parser(name, help=what, description=what)
        if argument:
            action.add_argument("model", metavar=argument)
        add_address(action)
        action.add_argument("--json", action="store_true", help="print a JSON array")
    given = args.parse_args(argv)
    with failures("models"), gateway(given) as client:
        if given.action == "list":
            models = client.models()
        else:
            models = client.change_model(given.action, *_name_and_source(given.action, given.model))
        print(json.dumps([plain(model) for model in models]) if given.json else _table(models))
    return 0


def _name_and_source(action: str, text: str) -> tuple[str, str]:
    if action != "load" and "=" not in text:
        return text, ""
    try:
        model = parse_model(text)
    except ValueError as error:
        raise Failure(str(error).removeprefix("--model ")) from None
    return model.name, model.source


def _table(models: list[types_pb2.ModelDescription]) -> str:
    if not models:
        return "no models"
    rows = [("NAME", "ARCHITECTURE", "PARAMETERS", "CONTEXT", "SOURCE")]
    for model in models:
        if model.members:
            rows.append((model.name, "alias", "", str(model.context_length), f"one of {', '.join(model.members)}"))
            continue
        size = f"{model.parameter_count / 1e6:,.0f} M"
        rows.append((model.name, model.architecture, size, str(model.context_length), model.source))
    return align(rows)
