"""How much memory this process may still take: the machine's, its control group's, its NUMA nodes'.

Every reader takes the root of the file system, so that tests imitate any machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.common.topology_sysfs import read_meminfo, read_topology


@dataclass(frozen=True, slots=True)
class MemoryView:
    """Bytes that can still be had, what set the bound, and the nodes that the process may compute on."""

    available: int
    bound: str  # "machine", "control group" or "NUMA nodes", for people
    nodes: tuple[int, ...]


def measure(root: Path = Path("/"), cpus: frozenset[int] | None = None) -> MemoryView:
    """The least of what machine, control group and NUMA nodes leave. `cpus` is the process's affinity."""
    bounds = [(read_meminfo(root / "proc/meminfo")["MemAvailable"], "machine")]
    group = _group_available(root)
    if group is not None:
        bounds.append((group, "control group"))
    topology = read_topology(root, cpus)
    if sources := topology.memory_sources:
        bounds.append((sum(node.available for node in sources), "NUMA nodes"))
    available, why = min(bounds)
    return MemoryView(max(available, 0), why, tuple(node.node_id for node in topology.usable))


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
