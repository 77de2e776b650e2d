"""The command `quire`. Each command is a module with `run(argv) -> int`, imported only when it is asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from quire import __version__

COMMANDS = {
    "up": "start the services of this machine and watch over them",
    "down": "stop what `quire up` started",
    "status": "show services, models, queue and memory",
    "plan": "say what of a model and its KV fits into a memory",
    "chat": "talk with a model in the terminal",
    "generate": "continue one prompt",
    "models": "list, load, unload or reload models",
    "executors": "list, add, drain or remove executors",
    "keys": "create, list or revoke API keys of tenants",
    "usage": "show what tenants used, by day and model",
    "bench": "measure the engine or a whole serving stack",
    "eval": "measure how well a model computes: perplexity, agreement with a reference",
    "quantize": "make a smaller checkpoint of a model: GPTQ, AWQ, INT8, FP8",
    "prune": "make a smaller model: fewer layers, narrower MLPs, fewer heads",
    "simulate": "what a load would see of schedulers and caches, without a model",
    "serve": "run one service in the foreground (compose, Kubernetes)",
    "health": "ask a service whether it is ready",
}


def help_text() -> str:
    """The text of `quire --help`."""
    lines = [f"  {name:<10} {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            "usage: quire [--version] COMMAND ...",
            "",
            "Serves large language models as four gRPC services.",
            "",
            *lines,
            "",
            "`quire COMMAND --help` says more. To begin: quire up",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Exit status: 0 done, 1 failed, 2 wrong use, 130 interrupted."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0 if args else 2
    if args[0] == "--version":
        print(f"quire {__version__}")
        return 0
    name = args[0]
    if name not in COMMANDS:
        from services.common.flags import meant

        print(f"quire: no such command: {name}{meant(name, COMMANDS)}; `quire --help` lists them", file=sys.stderr)
        return 2
    try:
        status: int = importlib.import_module(f"quire.cli.{name}").run(args[1:])
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output left, as `head` does
        sys.stderr.close()
        return 1
