"""Ports that cannot be had are found before anything starts, and named with what moves them."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence

from quire.supervisor.layout import HOST, PortUse, ServiceSpec
from quire.supervisor.listeners import Listener, listeners


def problems(services: Iterable[ServiceSpec]) -> list[str]:
    """Lines that say what is wrong: a port out of range or used twice in the layout; all that are taken in one line."""
    found: list[str] = []
    taken: list[PortUse] = []
    owners: dict[int, str] = {}
    for service in services:
        for use in service.ports:
            label = f"{service.name} {use.purpose}"
            if not 0 < use.port < 65536:
                found.append(f"{label} port {use.port} is not in 1..65535; change it with {use.flag}")
            elif use.port in owners:
                found.append(f"{label} port {use.port} is the {owners[use.port]}'s too; change one with {use.flag}")
            elif not _is_free(use.port):
                taken.append(use)
            owners.setdefault(use.port, label)
    if taken:
        found.append(describe_taken(taken, listeners([use.port for use in taken])))
    return found


def describe_taken(taken: Sequence[PortUse], holders: Iterable[Listener]) -> str:
    """One line for all ports that are taken, by whom where that is known, and what moves them."""
    by_name: dict[str, list[int]] = {}
    for holder in holders:
        by_name.setdefault(holder.name, []).append(holder.pid)
    known = " and ".join(f"{name} ({_processes(pids)})" for name, pids in by_name.items())
    ports = sorted(use.port for use in taken)
    by = f" by {known}" if known else ""
    move = "--port-base PORT moves all ports"
    if len(taken) == 1:
        return f"port {ports[0]} is taken{by}; {taken[0].flag} PORT moves it, {move}"
    return f"ports {_ranges(ports)} are taken{by}; {move}"


def _processes(pids: Sequence[int]) -> str:
    return f"process{'es' if len(pids) > 1 else ''} {', '.join(map(str, pids))}"


def _ranges(ports: Sequence[int]) -> str:
    """Ascending numbers, neighbours as FIRST-LAST."""
    runs: list[list[int]] = []
    for port in ports:
        if runs and port == runs[-1][-1] + 1:
            runs[-1].append(port)
        else:
            runs.append([port])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Connections of an earlier run that linger in TIME_WAIT do not hold the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
