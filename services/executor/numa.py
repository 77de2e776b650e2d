"""Which NUMA node an executor computes on, and where its KV lies: pure choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from services.common.errors import invalid
from services.common.topology import LOCAL_DISTANCE, UNKNOWN_DISTANCE, Gpu, Node, Topology


@dataclass(frozen=True, slots=True)
class Choice:
    """A node, what has to be asked of the kernel for it, and why it was chosen."""

    node: int | None  # None: the process stays where it is, over all nodes
    cpus: frozenset[int]  # to run on from now on; empty leaves them as they are
    asks_memory: bool  # whether memory is to be asked from the node
    why: str


class PoolPlace(NamedTuple):
    """A pool's NUMA node, -1 where it is not one, and what reaching it costs from where the executor computes."""

    node: int
    distance: int


def choose_node(wish: str | int, topology: Topology, gpu: Gpu | None) -> Choice:
    """Where to compute. `wish` is "auto", "none" or a node; `gpu` the one that computes, if one does.

    "auto" takes the GPU's node, or stays on one node where the process may run on no other. Raises INVALID_FIELD for a
    node that is not there or whose CPUs the process may not use.
    """
    if isinstance(wish, int):
        return _bind(_checked(wish, topology), topology, "asked for")
    if wish == "none":
        return Choice(None, frozenset(), False, "asked for none")
    if len(topology.usable) == 1:
        # Nothing is asked of the kernel: memory comes from where it is first written, unless a user chose otherwise.
        only = "its only node" if len(topology.computing) == 1 else "the process may run on no other"
        return Choice(topology.usable[0].node_id, frozenset(), False, only)
    if gpu is not None and gpu.node is not None and (node := topology.nearest_usable(gpu.node)) is not None:
        return _bind(node, topology, f"nearest to GPU {gpu.address}")
    return Choice(None, frozenset(), False, "several nodes and none chosen" if topology.usable else "no nodes known")


def _checked(node_id: int, topology: Topology) -> Node:
    node = topology.node(node_id)
    if node is None:
        known = ", ".join(str(node.node_id) for node in topology.nodes) or "none"
        raise invalid("numa_node", f"there is no node {node_id}; nodes of this machine: {known}")
    if not node.cpus:
        raise invalid("numa_node", f"node {node_id} has memory but no CPUs")
    if node not in topology.usable:
        raise invalid("numa_node", f"this process may use none of the CPUs of node {node_id}")
    return node


def _bind(node: Node, topology: Topology, why: str) -> Choice:
    cpus = node.cpus & topology.cpus
    several = sum(other.total > 0 for other in topology.nodes) > 1
    return Choice(node.node_id, frozenset() if cpus == topology.cpus else cpus, several, why)


def cpu_pool_place(topology: Topology) -> PoolPlace:
    """Of KV in host memory, for CPUs that compute where the process may run."""
    nodes = [node.node_id for node in topology.usable]
    if len(nodes) > 1:
        return PoolPlace(-1, UNKNOWN_DISTANCE)
    return PoolPlace(nodes[0] if nodes else -1, LOCAL_DISTANCE)


def gpu_pool_place(gpu: Gpu | None) -> PoolPlace:
    """Of KV in the memory of the GPU that computes; None: it is not known which one that is."""
    return PoolPlace(-1 if gpu is None or gpu.node is None else gpu.node, LOCAL_DISTANCE)
