"""A machine's NUMA nodes, CPUs and GPUs, and what follows from them for one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LOCAL_DISTANCE = 10
"""Firmware's distance of a node to itself; 20 costs twice as much."""
UNKNOWN_DISTANCE = 0


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node that is online. It may have no CPUs (CXL, memory of a GPU) or no memory."""

    node_id: int
    cpus: frozenset[int]  # online ones
    total: int  # bytes
    free: int  # bytes that nothing uses
    available: int  # bytes that can be had without swapping
    distances: Mapping[int, int] = field(default_factory=dict)  # by node; empty where the kernel states none


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU on the PCI bus."""

    address: str  # such as "0000:17:00.0"
    vendor: str  # "nvidia" or "amd"
    device: str  # the vendor's number of the product, such as "0x2335"
    node: int | None  # where it is attached; None where firmware does not say
    minor: int | None = None  # N of /dev/nvidiaN; None where no driver says
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class Topology:
    """What the kernel shows of a machine to one process. No nodes: the kernel knows of none."""

    nodes: tuple[Node, ...]  # by number, which may have gaps
    gpus: tuple[Gpu, ...]  # by bus address
    cpus: frozenset[int]  # that the process may run on
    memory_nodes: frozenset[int]  # nodes that the process may have memory of

    def node(self, node_id: int) -> Node | None:
        return next((node for node in self.nodes if node.node_id == node_id), None)

    @property
    def computing(self) -> tuple[Node, ...]:
        """Nodes with CPUs."""
        return tuple(node for node in self.nodes if node.cpus)

    @property
    def usable(self) -> tuple[Node, ...]:
        """Nodes with CPUs that the process may run on."""
        return tuple(node for node in self.nodes if node.cpus & self.cpus)

    @property
    def is_confined(self) -> bool:
        """Whether the process may run on one node only, of several."""
        return len(self.usable) == 1 < len(self.computing)

    @property
    def memory_sources(self) -> tuple[Node, ...]:
        """The nodes that the process's memory is to come from, where these are not all that have some; else none.

        Memory of nodes without CPUs is slower, or a GPU's own: what fits only there does not fit.
        """
        with_memory = [node for node in self.nodes if node.total]
        allowed = [node for node in with_memory if node.node_id in self.memory_nodes]
        near = [node for node in allowed if node.cpus & self.cpus]
        return tuple(near or allowed) if len(near or allowed) < len(with_memory) else ()

    def distance(self, here: int, there: int) -> int:
        """What reaching memory of node `there` costs from node `here`; UNKNOWN_DISTANCE where nothing says."""
        if here == there:
            return LOCAL_DISTANCE
        for start, end in ((here, there), (there, here)):
            node = self.node(start)
            if node is not None and end in node.distances:
                return node.distances[end]
        return UNKNOWN_DISTANCE

    def nearest_usable(self, node_id: int) -> Node | None:
        """The node nearest to `node_id` on whose CPUs the process may run; of equals, or unknown ones, the first."""
        unknown = 1 << 30

        def order(node: Node) -> tuple[int, int]:
            return self.distance(node.node_id, node_id) or unknown, node.node_id

        return min(self.usable, key=order, default=None)
