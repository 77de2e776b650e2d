"""Which processes listen on TCP ports, as far as Linux lets this user see them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

_LISTENS = "0A"  # state of a socket in /proc/net/tcp


class Listener(NamedTuple):
    """A process with a socket that listens. `name` is its program, or "Quire"."""

    pid: int
    name: str


def listeners(ports: Collection[int], proc: Path = Path("/proc")) -> list[Listener]:
    """Those on any of these ports, by process id. Empty where the system does not tell."""
    sockets = {
        f"socket:[{inode}]"
        for table in ("tcp", "tcp6")
        for port, inode in _listening(proc / "net" / table)
        if port in ports
    }
    if not sockets:
        return []
    pids = sorted(int(entry.name) for entry in proc.iterdir() if entry.name.isdigit())
    return [Listener(pid, _name(proc / str(pid))) for pid in pids if sockets & _open_files(proc / str(pid))]


def _listening(table: Path) -> list[tuple[int, str]]:
    """Port and inode of every socket that listens."""
    with contextlib.suppress(OSError):
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
        return [(int(row[1].rpartition(":")[2], 16), row[9]) for row in rows if row[3] == _LISTENS]
    return []


def _open_files(process: Path) -> set[str]:
    """What its file descriptors refer to; empty for a process of somebody else, or one that is gone."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for handle in list((process / "fd").iterdir()):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                found.add(os.readlink(handle))
    return found


def _name(process: Path) -> str:
    with contextlib.suppress(OSError):
        if b"\0quire.cli\0" in (process / "cmdline").read_bytes():
            return "Quire"
        return (process / "comm").read_text().strip()
    return "a program"
