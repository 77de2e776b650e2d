"""How much memory this process may still take: the machine's, its control group's, its NUMA nodes'.

Every reader takes the root of the file system, so that tests imitate any machine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node: its CPUs and the memory that can be had without swapping, in bytes."""

    node_id: int
    cpus: frozenset[int]
    available: int


@dataclass(frozen=True, slots=True)
class MemoryView:
    """Bytes that can still be had, what set the bound, and the nodes that the process is bound to, if it is."""

    available: int
    bound: str  # "machine", "control group" or "NUMA nodes", for people
    nodes: tuple[int, ...]


def measure(root: Path = Path("/"), cpus: frozenset[int] | None = None) -> MemoryView:
    """The least of what machine, control group and bound nodes leave. `cpus` is the process's affinity."""
    allowed = cpus if cpus is not None else frozenset(os.sched_getaffinity(0))
    bounds = [(_meminfo(root / "proc/meminfo")["MemAvailable"], "machine")]
    group = _group_available(root)
    if group is not None:
        bounds.append((group, "control group"))
    nodes = read_nodes(root)
    bound = bound_nodes(nodes, allowed)
    if bound:
        bounds.append((sum(node.available for node in bound), "NUMA nodes"))
    available, why = min(bounds)
    return MemoryView(max(available, 0), why, tuple(node.node_id for node in bound))


def bound_nodes(nodes: list[Node], cpus: frozenset[int]) -> list[Node]:
    """The nodes that hold all of the process's CPUs, where these are fewer than all nodes with CPUs."""
    with_cpus = [node for node in nodes if node.cpus]
    used = [node for node in with_cpus if node.cpus & cpus]
    return used if 0 < len(used) < len(with_cpus) else []


def read_nodes(root: Path) -> list[Node]:
    """The machine's nodes; empty where the kernel shows none."""
    found = []
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        try:
            cpus = parse_cpus((folder / "cpulist").read_text())
            info = _meminfo(folder / "meminfo")
        except (OSError, ValueError):
            continue
        # Nodes state no MemAvailable: free pages and the page cache that can be dropped at once.
        reclaimable = info.get("Inactive(file)", 0) + info.get("SReclaimable", 0) // 2
        found.append(Node(int(folder.name[4:]), cpus, info.get("MemFree", 0) + reclaimable))
    return found


def parse_cpus(text: str) -> frozenset[int]:
    """A kernel CPU list such as "0-3,8"."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _meminfo(path: Path) -> dict[str, int]:
    """Bytes by name from a meminfo file, the machine's or a node's (whose lines begin with "Node N")."""
    values = {}
    for line in path.read_text().splitlines():
        words = line.split()
        if words[:1] == ["Node"]:
            words = words[2:]
        if len(words) >= 2:
            values[words[0].rstrip(":")] = int(words[1]) * (1024 if words[-1] == "kB" else 1)
    return values


def _group_available(root: Path) -> int | None:
    """What the tightest control group above this process leaves, or None where nothing limits it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    found: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += _limits(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            found += _limits(
                root / "sys/fs/cgroup/memory",
                path,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
    return min(found, default=None)


def _limits(mount: Path, path: str, limit: str, usage: str, dropped: str) -> list[int]:
    """What each group from `path` up to the mount leaves; inside a container only the mount itself may be visible."""
    found = []
    parts = [part for part in path.split("/") if part and part != ".."]
    for depth in range(len(parts), -1, -1):
        group = mount.joinpath(*parts[:depth])
        try:
            most = (group / limit).read_text().strip()
            used = int((group / usage).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if most != "max" and int(most) < 1 << 60:  # version 1 writes "no limit" as a huge number
            found.append(int(most) - used + int(stat.get(dropped, 0)))
    return found
