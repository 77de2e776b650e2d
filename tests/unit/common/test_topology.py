"""Topology of imitated machines, whole and damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from services.common.topology import Topology
from services.common.topology_sysfs import parse_list, read_meminfo, read_topology
from tests.fixtures.topologies import ALL_CPUS, MACHINES, machine

GIB = 1 << 30
NODES = "sys/devices/system/node"


def ids(nodes: object) -> list[int]:
    return [node.node_id for node in nodes]


@pytest.fixture
def copy(tmp_path: Path):
    """A machine's folder to damage."""

    def make(name: str) -> Path:
        return Path(shutil.copytree(MACHINES / name, tmp_path / name))

    return make


def test_one_node() -> None:
    topology = machine("one_node")
    (node,) = topology.nodes
    assert (node.node_id, node.cpus, node.distances) == (0, frozenset(range(4)), {0: 10})
    assert (node.total, node.free, node.available) == (16 * GIB, 8 * GIB, 10 * GIB)
    assert ids(topology.usable) == [0]
    assert topology.memory_sources == ()
    assert not topology.is_confined
    assert topology.gpus == ()


def test_two_equal_nodes() -> None:
    topology = machine("two_equal_nodes")
    assert [node.cpus for node in topology.nodes] == [
        frozenset({*range(8), *range(16, 24)}),
        frozenset({*range(8, 16), *range(24, 32)}),
    ]
    assert topology.distance(0, 1) == topology.distance(1, 0) == 21
    assert ids(topology.usable) == [0, 1]
    assert topology.memory_sources == ()
    assert not topology.is_confined


def test_four_nodes_with_unequal_distances() -> None:
    topology = machine("four_unequal_nodes")
    assert [topology.distance(0, there) for there in range(4)] == [10, 12, 32, 32]
    assert [topology.distance(there, 3) for there in range(4)] == [32, 32, 12, 10]
    neighbours = machine("four_unequal_nodes", frozenset(range(8)))
    assert ids(neighbours.usable) == ids(neighbours.memory_sources) == [0, 1]
    assert neighbours.nearest_usable(1) == neighbours.node(1)
    assert machine("four_unequal_nodes", frozenset({0, 12})).nearest_usable(2).node_id == 3


def test_eight_gpus_over_two_nodes() -> None:
    topology = machine("eight_gpus_two_nodes")
    assert [gpu.node for gpu in topology.gpus] == [0] * 4 + [1] * 4
    first = topology.gpus[0]
    assert (first.address, first.vendor, first.device) == ("0000:1b:00.0", "nvidia", "0x2335")
    assert (first.minor, first.uuid) == (4, "GPU-00000000-1111-2222-3333-444444444444")
    assert [len(node.cpus) for node in topology.nodes] == [64, 64]


def test_memory_of_a_gpu_as_a_node() -> None:
    topology = machine("grace_hopper")
    assert ids(topology.nodes) == [0, 1, 4]
    assert ids(topology.computing) == ids(topology.usable) == [0]
    assert not topology.is_confined, "there is no other node to compute on"
    assert ids(topology.memory_sources) == [0], "the GPU's memory is not the host's"
    assert (topology.distance(0, 1), topology.distance(0, 4), topology.distance(4, 1)) == (80, 80, 255)
    assert topology.nearest_usable(1) == topology.node(0)
    assert [gpu.node for gpu in topology.gpus] == [0]


def test_a_process_on_some_cpus() -> None:
    topology = machine("two_equal_nodes", frozenset({8, 25}))
    assert ids(topology.usable) == ids(topology.memory_sources) == [1]
    assert topology.is_confined
    assert ids(machine("two_equal_nodes", frozenset({7, 8})).memory_sources) == []


def test_cpus_that_are_offline_are_not_there(copy) -> None:
    root = copy("two_equal_nodes")
    (root / "sys/devices/system/cpu/online").write_text("0-7,16-20\n")
    topology = read_topology(root, ALL_CPUS)
    assert topology.cpus == frozenset({*range(8), *range(16, 21)})
    assert [len(node.cpus) for node in topology.nodes] == [13, 0]
    assert ids(topology.computing) == ids(topology.usable) == [0]
    assert ids(topology.memory_sources) == [0]


def test_memory_that_the_control_group_denies(copy) -> None:
    root = copy("two_equal_nodes")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/status").write_text("Name:\tx\nMems_allowed:\t2\nMems_allowed_list:\t1\n")
    assert ids(read_topology(root, ALL_CPUS).memory_sources) == [1]
    assert ids(read_topology(root, frozenset({0})).memory_sources) == [1], "CPUs of one node, memory of the other"


def test_a_node_with_cpus_and_no_memory_takes_it_from_anywhere(copy) -> None:
    root = copy("two_equal_nodes")
    (root / NODES / "node0/meminfo").write_text("Node 0 MemTotal: 0 kB\nNode 0 MemFree: 0 kB\n")
    assert read_topology(root, frozenset({0})).memory_sources == ()


def test_a_machine_without_sysfs(tmp_path: Path) -> None:
    assert read_topology(tmp_path, frozenset({0, 1})) == Topology((), (), frozenset({0, 1}), frozenset())
    assert read_topology(tmp_path, frozenset({0})).nearest_usable(0) is None


@pytest.mark.parametrize("row", ["10\n", "10 21 31\n", "10 x\n", "-1 10\n", "", "10 99999999999\n"])
def test_a_wrong_row_of_distances_says_nothing(copy, row: str) -> None:
    root = copy("two_equal_nodes")
    (root / NODES / "node0/distance").write_text(row)
    topology = read_topology(root, ALL_CPUS)
    assert topology.distance(0, 1) == 21, "the other node's row says it"
    (root / NODES / "node1/distance").unlink()
    topology = read_topology(root, ALL_CPUS)
    assert (topology.distance(0, 1), topology.distance(0, 0), topology.distance(0, 7)) == (0, 10, 0)
    assert topology.nearest_usable(1) == topology.node(1)


def test_distances_below_local_are_unknown(copy) -> None:
    root = copy("two_equal_nodes")
    for node in (0, 1):
        (root / NODES / f"node{node}/distance").write_text("0 0\n")
    assert read_topology(root, ALL_CPUS).distance(0, 1) == 0


def test_garbage_in_place_of_nodes(copy) -> None:
    root = copy("two_equal_nodes")
    (root / NODES / "node0/cpulist").write_bytes(b"\xff\xfe 0-\n")
    (root / NODES / "node1/meminfo").write_text("Node 1 MemFree: lots kB\nNode 1\n\nMemTotal\n")
    (root / NODES / "node7x").mkdir()
    (root / "sys/devices/system/cpu/online").write_text("all of them\n")
    topology = read_topology(root, frozenset({0, 8}))
    (node,) = topology.nodes
    assert (node.node_id, node.total, node.available) == (1, 0, 0)
    assert topology.cpus == frozenset({0, 8})


def test_nodes_that_are_not_online_are_not_there(copy) -> None:
    root = copy("two_equal_nodes")
    (root / NODES / "online").write_text("1\n")
    (root / NODES / "node1/distance").write_text("10\n")
    topology = read_topology(root, ALL_CPUS)
    assert ids(topology.nodes) == [1]
    assert topology.nodes[0].distances == {1: 10}


def test_gpus_that_no_firmware_places(copy) -> None:
    root = copy("eight_gpus_two_nodes")
    devices = root / "sys/bus/pci/devices"
    (devices / "0000:1b:00.0/numa_node").write_text("-1\n")
    (devices / "0000:43:00.0/numa_node").unlink()
    (devices / "0000:52:00.0/vendor").write_text("0x1002\n")
    (devices / "0000:52:00.0/class").write_text("0x120000\n")
    (devices / "0000:61:00.0/class").write_text("\n")
    shutil.rmtree(root / "proc")
    gpus = read_topology(root, ALL_CPUS).gpus
    assert [(gpu.vendor, gpu.node) for gpu in gpus[:3]] == [("nvidia", None), ("nvidia", None), ("amd", 0)]
    assert len(gpus) == 7
    assert {(gpu.minor, gpu.uuid) for gpu in gpus} == {(None, "")}


def test_gpus_are_ordered_by_domain_first(copy) -> None:
    root = copy("grace_hopper")
    for address in ("10000:01:00.0", "0002:ff:00.0"):
        shutil.copytree(root / "sys/bus/pci/devices/0009:01:00.0", root / "sys/bus/pci/devices" / address)
    order = ["0002:ff:00.0", "0009:01:00.0", "10000:01:00.0"]
    assert [gpu.address for gpu in read_topology(root, ALL_CPUS).gpus] == order


def test_this_machine() -> None:
    topology = read_topology()
    assert topology.cpus
    assert all(topology.distance(node.node_id, node.node_id) == 10 for node in topology.nodes)


def test_lists() -> None:
    assert parse_list("0-2,5\n") == {0, 1, 2, 5}
    assert parse_list("\n") == parse_list("") == frozenset()


@pytest.mark.parametrize("text", ["x", "1-", "-1", "1-2-3", "0x3", "0-999999999", "1;2", "²"])
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(ValueError, match="no range"):
        parse_list(text)


def test_meminfo(tmp_path: Path) -> None:
    path = tmp_path / "meminfo"
    path.write_text("Node 12 MemFree:   2 kB\nInactive(file): 3 kB\nHugePages_Total:  5\nnonsense\nX: -1 kB\nY: kB\n")
    assert read_meminfo(path) == {"MemFree": 2048, "Inactive(file)": 3072, "HugePages_Total": 5}
