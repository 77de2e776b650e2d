"""Which processes a run consists of, with their commands, environments and ports: a pure function of the options."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from quire.supervisor.options import ModelChoice, UpOptions

HOST = "127.0.0.1"
SUPERVISOR_PID = "QUIRE_SUPERVISOR_PID"
"""Variable that tells `quire serve` whose end is its own end too."""
LIVENESS = "liveness"
"""Health service that says only that the process answers; an executor without a model is not ready."""
NO_NODES: Mapping[int, int] = MappingProxyType({})
EXECUTOR_SETTINGS = (
    "context_length",
    "draft",
    "kv",
    "kv_blocks",
    "kv_disk",
    "kv_disk_size",
    "max_sequences",
    "max_step_tokens",
)


@dataclass(frozen=True, slots=True)
class PortUse:
    """A port that a service binds, and the flag of `quire up` that moves it."""

    port: int
    flag: str
    purpose: str


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One process to run."""

    name: str
    role: str
    command: tuple[str, ...]
    target: str
    ports: tuple[PortUse, ...]
    health_service: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def lay_out(options: UpOptions, cores: int, node_cores: Mapping[int, int] = NO_NODES) -> list[ServiceSpec]:
    """The services in start order: what others need comes first. They end in the opposite order.

    Executors share the `cores`; the other services are single-threaded apart from short-lived helpers. `node_cores`
    says how many of them each NUMA node has, where executors are to be spread over several.
    """
    executors = _executors(options, cores, node_cores)
    ports = options.ports
    common = ["--drain-seconds", f"{options.drain_seconds:g}", "--log-level", options.log_level]
    kvmanager = f"{HOST}:{ports.kvmanager}"
    scheduler = f"{HOST}:{ports.scheduler}"

    def light(
        name: str, port: int, flag: str, metrics: int, *arguments: str, extra: tuple[PortUse, ...] = ()
    ) -> ServiceSpec:
        listen = ["--listen", f"{HOST}:{port}", "--metrics-listen", f"{HOST}:{ports.metrics + metrics}"]
        return ServiceSpec(
            name=name,
            role=name,
            command=_serve(name, [*listen, *arguments, *common]),
            target=f"{HOST}:{port}",
            ports=(PortUse(port, flag, "gRPC"), *extra, PortUse(ports.metrics + metrics, "--metrics-port", "metrics")),
            environment={"OMP_NUM_THREADS": "1"},
        )

    http = ("--http-listen", f"{HOST}:{ports.http}")
    return [
        light("kvmanager", ports.kvmanager, "--kvmanager-port", 2),
        *executors,
        light(
            "scheduler",
            ports.scheduler,
            "--scheduler-port",
            1,
            *("--kvmanager", kvmanager, "--executors", ",".join(spec.target for spec in executors)),
            *_given(options, "gap_ms", "gap_stretch", "grant_ms", "speculation"),
            *(("--aliases", " ".join(options.aliases)) if options.aliases else ()),
        ),
        light(
            "gateway",
            ports.grpc,
            "--grpc-port",
            0,
            *("--scheduler", scheduler, *http),
            *(() if options.keys is None else ("--keys", options.keys)),
            extra=(PortUse(ports.http, "--http-port", "HTTP"),),
        ),
    ]


class Home(NamedTuple):
    """Where an executor computes, with how many threads. None: wherever the system puts it."""

    node: int | None
    threads: int


def homes(holding: int, spare: int, cores: int, node_cores: Mapping[int, int]) -> list[Home]:
    """Of the executors that hold a model, then of the spare ones.

    Round-robin over the NUMA nodes, where each gets one; with fewer executors than nodes, no node lies idle. Spare ones
    do not count when threads are shared out, for they have nothing to compute.
    """
    if not 1 < len(node_cores) <= holding:
        return [Home(None, max(1, cores // holding))] * (holding + spare)
    nodes = sorted(node_cores)
    order = [nodes[index % len(nodes)] for index in range(holding + spare)]
    sharing = Counter(order[:holding])
    return [Home(node, max(1, node_cores[node] // sharing[node])) for node in order]


def _executors(options: UpOptions, cores: int, node_cores: Mapping[int, int]) -> list[ServiceSpec]:
    """One executor per model and replica, then the spare ones."""
    held: list[ModelChoice | None] = [model for model in options.models for _ in range(options.executors)]
    places = homes(len(held), options.spare_executors, cores, node_cores)
    held += [None] * options.spare_executors
    single = len(held) == 1
    return [
        _executor(options, "executor" if single else f"executor-{index + 1}", index, model, home)
        for index, (model, home) in enumerate(zip(held, places, strict=True))
    ]


def _executor(options: UpOptions, name: str, index: int, model: ModelChoice | None, home: Home) -> ServiceSpec:
    ports = options.ports
    port, metrics = ports.executor + index, ports.metrics + 3 + index
    arguments = ["--listen", f"{HOST}:{port}", "--metrics-listen", f"{HOST}:{metrics}"]
    arguments += ["--kvmanager", f"{HOST}:{ports.kvmanager}", "--backend", options.backend]
    arguments += ["--threads", str(home.threads)]
    if home.node is not None:
        arguments += ["--numa-node", str(home.node)]
    if model is not None:
        arguments += ["--model", model.source, "--model-name", model.name]
    if options.dtype is not None:
        arguments += ["--dtype", options.dtype]
    arguments += _given(options, *EXECUTOR_SETTINGS)
    arguments += ["--drain-seconds", f"{options.drain_seconds:g}", "--log-level", options.log_level]
    return ServiceSpec(
        name=name,
        role="executor",
        command=_serve("executor", arguments),
        target=f"{HOST}:{port}",
        ports=(PortUse(port, "--executor-port", "gRPC"), PortUse(metrics, "--metrics-port", "metrics")),
        health_service="" if model is not None else LIVENESS,
    )


def _given(options: UpOptions, *settings: str) -> list[str]:
    """Flags for those settings that were chosen; a service knows its defaults."""
    chosen = [(setting, value) for setting in settings if (value := getattr(options, setting)) is not None]
    return [part for setting, value in chosen for part in (f"--{setting.replace('_', '-')}", str(value))]


def _serve(role: str, arguments: list[str]) -> tuple[str, ...]:
    return (sys.executable, "-m", "quire.cli", "serve", role, *arguments)
