"""`quire up`: all services of one machine."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from quire.cli.common import parser
from quire.supervisor.options import DEFAULT_MODEL, Ports, UpOptions, absolute, parse_model
from quire.supervisor.profiles import PROFILES, apply_profile, describe_profile
from quire.supervisor.rundir import RunDirectory
from quire.supervisor.up import UpError, greet, run_detached, run_foreground
from services.common.kv_policy import NAMES
from services.gateway.keys.file import read_keys
from services.gateway.settings import KEYS_IN_REDIS

EXAMPLES = f"""
quire up                                        the small model {DEFAULT_MODEL}
quire up --model ~/models/my-llama              a Hugging Face folder or a .gguf file of your own
quire up --model a=owner/name --model b=b.gguf  two models, with names of your choice
quire up --detach && quire status               in the background
QUIRE_RUN_DIR=~/two quire up --port-base 7000   a second one beside the first"""


def run(argv: Sequence[str]) -> int:
    args = _parser()
    given = args.parse_args(argv)
    try:
        chosen = _options(given)
    except ValueError as error:
        args.error(str(error))
    if given.json and not given.detach:
        args.error("--json needs --detach: otherwise the log is printed")
    if chosen.profile is not None:
        print(f"quire up: {describe_profile(chosen)}", file=sys.stderr)
    options = apply_profile(chosen)
    directory = RunDirectory()
    try:
        if given.detach:
            state = run_detached(options, directory, _without_detach(argv))
            if given.json:
                print(json.dumps({"grpc": state.grpc, "http": state.http, "log": state.log, "pid": state.pid}))
            else:
                asyncio.run(greet(state, sys.stdout, demo=not given.no_demo))
            return 0
        terminal = None if given.log_file else sys.stdout
        return run_foreground(options, directory, log=given.log_file, terminal=terminal, demo=not given.no_demo)
    except UpError as error:
        for line in str(error).splitlines():
            print(f"quire up: {line}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    args = parser("up", "Starts gateway, scheduler, kvmanager and executors, and restarts one that dies.", EXAMPLES)
    add = args.add_argument
    add(
        "--model",
        action="append",
        metavar="[NAME=]SOURCE",
        help=f"a folder, a .gguf file, a hub id or a catalogue name; repeatable (default: {DEFAULT_MODEL})",
    )
    add("--executors", type=int, default=1, metavar="N", help="executors per model (default: 1)")
    add(
        "--spare-executors",
        type=int,
        default=1,
        metavar="N",
        help="executors without a model, for `quire models load` (default: 1)",
    )
    add(
        "--backend",
        default="auto",
        choices=("auto", "cpu", "torch", "cuda"),
        help="what computes: native code on the CPU, PyTorch, or Triton kernels on a GPU (default: auto, the best that "
        "takes the model, but never cuda yet)",
    )
    add(
        "--dtype",
        choices=("auto", "fp32", "bf16", "fp16"),
        help="number format of weights (default: auto, the backend's best for the file)",
    )
    add("--context-length", type=int, metavar="TOKENS", help="longest prompt plus output (default: the model's)")
    add(
        "--draft",
        metavar="MODEL|ngram|early-exit[:N]|none",
        help="what proposes tokens that the model then checks: a smaller model of the same vocabulary, what the text "
        "repeats, or the model's first N layers (default: none)",
    )
    add("--speculation", metavar="K", help="how many of them in a step: auto, off or a number up to 16 (default: auto)")
    add(
        "--kv",
        choices=NAMES,
        help="keep older keys and values in fewer bits: int8, then int4 (default: hot, all as they were computed)",
    )
    add(
        "--kv-blocks",
        type=int,
        metavar="N",
        help="blocks of KV memory per executor, in each format (default: from free memory)",
    )
    add("--kv-disk", metavar="FOLDER", help="keep KV that memory has no room for in files there (default: drop it)")
    add("--kv-disk-size", metavar="SIZE", help="how much each executor keeps there (default: 4GiB)")
    add(
        "--keys",
        metavar="FILE",
        help="API keys and their tenants, see `quire keys --help` (default: none are asked for)",
    )
    add(
        "--profile",
        choices=tuple(PROFILES),
        help="set the next five flags and --kv together; what is given explicitly wins (default: each service's own)",
    )
    add("--max-sequences", type=int, metavar="N", help="most sequences that one step of an executor computes")
    add("--max-step-tokens", type=int, metavar="N", help="most tokens that one step of an executor computes")
    add("--gap-ms", type=float, metavar="MS", help="about how long prompts may hold up the next token of others")
    add("--gap-stretch", type=float, metavar="X", help="and at most so many times as long as without them")
    add("--grant-ms", type=float, metavar="MS", help="how far executors may run ahead of the scheduler")
    add(
        "--alias",
        action="append",
        default=[],
        metavar="NAME=MODEL[@FACT=A..B],MODEL",
        help="a name for several models: the first whose facts (output, prompt, priority, waiting) hold; repeatable",
    )
    add("--detach", action="store_true", help="return once all is healthy and keep serving in the background")
    add("--no-demo", action="store_true", help="do not ask the model a first question")
    add("--json", action="store_true", help="with --detach: print the addresses as JSON")
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    add(
        "--drain-seconds", type=float, default=30.0, help="how long running streams may finish at the end (default: 30)"
    )
    add("--log-file", type=Path, help=argparse.SUPPRESS)
    ports = args.add_argument_group(
        "ports", "on 127.0.0.1; the variable QUIRE_RUN_DIR names the folder of a second run"
    )
    default = Ports()
    ports.add_argument("--port-base", type=int, metavar="PORT", help="put all ports in a row from here on")
    ports.add_argument("--grpc-port", type=int, metavar="PORT", help=f"the public gRPC API (default: {default.grpc})")
    ports.add_argument("--http-port", type=int, metavar="PORT", help=f"the OpenAI API (default: {default.http})")
    ports.add_argument("--scheduler-port", type=int, metavar="PORT", help=f"(default: {default.scheduler})")
    ports.add_argument("--kvmanager-port", type=int, metavar="PORT", help=f"(default: {default.kvmanager})")
    ports.add_argument(
        "--executor-port",
        type=int,
        metavar="PORT",
        help=f"the first executor's; others follow (default: {default.executor})",
    )
    ports.add_argument(
        "--metrics-port", type=int, metavar="PORT", help=f"the gateway's; others follow (default: {default.metrics})"
    )
    return args


def _options(given: argparse.Namespace) -> UpOptions:
    base = Ports() if given.port_base is None else Ports.from_base(given.port_base)
    if given.keys not in (None, str(KEYS_IN_REDIS)):
        read_keys(Path(given.keys))  # refused here, in one line, instead of by the gateway
    names = ("grpc", "http", "scheduler", "kvmanager", "executor", "metrics")
    chosen = {name: getattr(given, f"{name}_port") for name in names}
    ports = Ports(**{name: getattr(base, name) if value is None else value for name, value in chosen.items()})
    return UpOptions(
        models=tuple(map(parse_model, given.model or [DEFAULT_MODEL])),
        executors=given.executors,
        spare_executors=given.spare_executors,
        backend=given.backend,
        dtype=given.dtype,
        context_length=given.context_length,
        draft=given.draft and absolute(given.draft),
        speculation=given.speculation,
        kv=given.kv,
        kv_blocks=given.kv_blocks,
        kv_disk=given.kv_disk,
        kv_disk_size=given.kv_disk_size,
        keys=given.keys and absolute(given.keys),
        max_sequences=given.max_sequences,
        max_step_tokens=given.max_step_tokens,
        gap_ms=given.gap_ms,
        gap_stretch=given.gap_stretch,
        grant_ms=given.grant_ms,
        profile=given.profile,
        aliases=tuple(given.alias),
        drain_seconds=given.drain_seconds,
        log_level=given.log_level,
        ports=ports,
    )


def _without_detach(argv: Sequence[str]) -> list[str]:
    return [arg for arg in argv if arg not in ("--detach", "--json")]
