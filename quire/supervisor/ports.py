"""Taken ports are found before anything starts, and named with the flag that moves them."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from quire.supervisor.layout import HOST, ServiceSpec


def problems(services: Iterable[ServiceSpec]) -> list[str]:
    """One line per port that cannot be had: used twice in the layout, out of range, or taken on this machine."""
    found: list[str] = []
    owners: dict[int, str] = {}
    for service in services:
        for use in service.ports:
            label = f"{service.name} {use.purpose} port {use.port}"
            if not 0 < use.port < 65536:
                found.append(f"{label} is not in 1..65535; change it with {use.flag}")
            elif use.port in owners:
                found.append(f"{label} is the {owners[use.port]}'s too; change one with {use.flag}")
            elif not _is_free(use.port):
                found.append(f"{label} is taken by another program; free it or choose another with {use.flag}")
            owners.setdefault(use.port, f"{service.name} {use.purpose}")
    return found


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Connections of an earlier run that linger in TIME_WAIT do not hold the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
