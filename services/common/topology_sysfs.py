"""Reads a machine's topology from sysfs. The root is the caller's, so that tests imitate any machine.

What cannot be read or understood is left out: a wrong line of firmware never keeps a process from starting.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from services.common.topology import LOCAL_DISTANCE, Gpu, Node, Topology

_VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")  # VGA, 3D, other display, accelerator (AMD Instinct)
_MOST_CPUS = 1 << 16  # a list that claims more is garbage, and would take the memory of a set that large


def read_topology(root: Path = Path("/"), cpus: frozenset[int] | None = None) -> Topology:
    """The topology below `root`. `cpus` is the process's affinity, by default the caller's."""
    online = _cpu_list(root / "sys/devices/system/cpu/online")
    nodes = _read_nodes(root / "sys/devices/system/node", online)
    allowed = usable_cpus() if cpus is None else cpus
    return Topology(
        nodes,
        _read_gpus(root),
        allowed if online is None else allowed & online,
        _memory_nodes(root) or frozenset(node.node_id for node in nodes),
    )


def usable_cpus() -> frozenset[int]:
    """CPUs that this process may run on; a container or taskset may leave it fewer than the machine has."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def parse_list(text: str) -> frozenset[int]:
    """A kernel list of CPUs or nodes, such as "0-3,8". Raises ValueError for anything else."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part.strip())
        if match is None or int(match[2] or match[1]) - int(match[1]) >= _MOST_CPUS:
            raise ValueError(f"{part!r} is no range of a kernel list")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)


def read_meminfo(path: Path) -> dict[str, int]:
    """Bytes by name from a meminfo file, the machine's or a node's (whose lines begin with "Node N").

    Raises OSError; lines that are none of meminfo are left out.
    """
    values = {}
    for line in path.read_text(errors="replace").splitlines():
        match = re.fullmatch(r"(?:Node +[0-9]+ +)?([\w()]+): +([0-9]{1,18})( kB)? *", line)
        if match is not None:
            values[match[1]] = int(match[2]) * (1024 if match[3] else 1)
    return values


def _read_nodes(folder: Path, online: frozenset[int] | None) -> tuple[Node, ...]:
    found = [int(path.name[4:]) for path in folder.glob("node*") if re.fullmatch(r"node[0-9]{1,9}", path.name)]
    listed = _cpu_list(folder / "online")
    ids = sorted(node_id for node_id in found if listed is None or node_id in listed)
    nodes = []
    for node_id in ids:
        cpus = _cpu_list(folder / f"node{node_id}/cpulist")
        if cpus is None:
            continue
        memory = _node_memory(folder / f"node{node_id}/meminfo")
        # Nodes state no MemAvailable: free pages and the page cache that can be dropped at once.
        dropped = memory.get("Inactive(file)", 0) + memory.get("SReclaimable", 0) // 2
        free = memory.get("MemFree", 0)
        nodes.append(
            Node(
                node_id,
                cpus if online is None else cpus & online,
                memory.get("MemTotal", 0),
                free,
                free + dropped,
                _distances(folder / f"node{node_id}/distance", ids),
            )
        )
    return tuple(nodes)


def _distances(path: Path, ids: list[int]) -> Mapping[int, int]:
    """A row has one number for each node that is online, in order of their numbers."""
    words = (_text(path) or "").split()
    if len(words) != len(ids) or not all(re.fullmatch(r"[0-9]{1,9}", word) for word in words):
        return {}
    return {node_id: int(word) for node_id, word in zip(ids, words, strict=True) if int(word) >= LOCAL_DISTANCE}


def _node_memory(path: Path) -> dict[str, int]:
    try:
        return read_meminfo(path)
    except OSError:
        return {}


def _memory_nodes(root: Path) -> frozenset[int]:
    """Nodes that the process's control group lets it have memory of; empty where nothing says."""
    match = re.search(r"^Mems_allowed_list:\s*([0-9,-]+)$", _text(root / "proc/self/status") or "", re.MULTILINE)
    try:
        return parse_list(match[1]) if match is not None else frozenset()
    except ValueError:
        return frozenset()


def _read_gpus(root: Path) -> tuple[Gpu, ...]:
    found = []
    for folder in (root / "sys/bus/pci/devices").glob("*"):
        vendor = _VENDORS.get(_text(folder / "vendor") or "")
        position = re.fullmatch(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", folder.name)
        if vendor is None or position is None or not (_text(folder / "class") or "").startswith(_GPU_CLASSES):
            continue
        node = _text(folder / "numa_node") or ""
        told = _text(root / "proc/driver/nvidia/gpus" / folder.name / "information") or ""
        minor = re.search(r"^Device Minor:\s*([0-9]{1,9})$", told, re.MULTILINE)
        uuid = re.search(r"^GPU UUID:\s*(GPU-[0-9a-f-]+)$", told, re.MULTILINE)
        gpu = Gpu(
            folder.name,
            vendor,
            _text(folder / "device") or "",
            int(node) if re.fullmatch(r"[0-9]{1,9}", node) else None,  # -1: firmware does not say
            int(minor[1]) if minor is not None else None,
            uuid[1] if uuid is not None else "",
        )
        found.append((tuple(int(part, 16) for part in position.groups()), gpu))
    return tuple(gpu for _, gpu in sorted(found, key=lambda item: item[0]))


def _cpu_list(path: Path) -> frozenset[int] | None:
    """A list of CPUs or nodes; None where it is missing or garbage."""
    text = _text(path)
    try:
        return None if text is None else parse_list(text)
    except ValueError:
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
