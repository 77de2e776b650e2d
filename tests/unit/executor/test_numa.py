"""Where an executor computes on imitated machines, and what becomes of it where the kernel refuses (K5)."""

from __future__ import annotations

import errno
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from services.common.errors import QuireError, Reason
from services.common.topology import Topology
from services.executor.gpus import first_cuda_gpu
from services.executor.metrics import ExecutorMetrics
from services.executor.numa import Choice, PoolPlace, choose_node, cpu_pool_place, gpu_pool_place
from services.executor.numa_binding import Binding, bind, may_use_gpu
from services.executor.settings import ExecutorSettings
from tests.fixtures.topologies import machine

ASIS: frozenset[int] = frozenset()
UNPINNED = {"cpus": ASIS, "asks_memory": False}
EMPTY = Topology((), (), frozenset({0}), frozenset())


class FakeKernel:
    """Notes what is asked; refuses with `pin_error` and `prefer_error`, if given."""

    def __init__(self, pin_error: int = 0, prefer_error: int = 0) -> None:
        self.asked: list[object] = []
        self._pin_error, self._prefer_error = pin_error, prefer_error

    def pin(self, cpus: frozenset[int]) -> None:
        self.asked.append(cpus)
        if self._pin_error:
            raise OSError(self._pin_error, "no")

    def prefer(self, node: int) -> None:
        self.asked.append(node)
        if self._prefer_error:
            raise OSError(self._prefer_error, "never")


def test_a_machine_of_one_node_needs_nothing_from_the_kernel() -> None:
    topology = machine("one_node")
    assert choose_node("auto", topology, None) == Choice(0, why="its only node", **UNPINNED)
    assert choose_node(0, topology, None) == Choice(0, why="asked for", **UNPINNED)
    kernel = FakeKernel()
    assert bind(choose_node("auto", topology, None), topology, kernel) == Binding(0, True, True)
    assert kernel.asked == []


def test_an_executor_alone_on_several_nodes_takes_none_and_says_what_would_help(caplog) -> None:
    topology, kernel = machine("two_equal_nodes"), FakeKernel()
    with caplog.at_level(logging.INFO):
        binding = bind(choose_node("auto", topology, None), topology, kernel)
    assert (binding.node, kernel.asked) == (None, [])
    (record,) = caplog.records
    assert record.nodes == [0, 1]
    assert "--executors N" in record.hint
    assert "--numa-node N" in record.hint


def test_a_node_that_is_asked_for() -> None:
    topology, kernel = machine("two_equal_nodes"), FakeKernel()
    assert bind(choose_node(1, topology, None), topology, kernel) == Binding(1, True, True)
    assert kernel.asked == [topology.node(1).cpus, 1]


def test_only_the_node_s_cpus_that_the_process_may_use() -> None:
    choice = choose_node(1, machine("two_equal_nodes", frozenset({0, 8, 24})), None)
    assert choice.cpus == {8, 24}


def test_auto_stays_on_the_one_node_it_was_given_and_leaves_memory_as_the_user_set_it() -> None:
    choice = choose_node("auto", machine("two_equal_nodes", frozenset({8, 9})), None)
    assert choice == Choice(1, why="the process may run on no other", **UNPINNED)


def test_none_is_none() -> None:
    assert choose_node("none", machine("four_unequal_nodes"), None).node is None


@pytest.mark.parametrize(
    ("name", "cpus", "node", "problem"),
    [
        ("two_equal_nodes", range(32), 7, "there is no node 7; nodes of this machine: 0, 1"),
        ("grace_hopper", range(72), 2, "there is no node 2; nodes of this machine: 0, 1, 4"),
        ("grace_hopper", range(72), 1, "node 1 has memory but no CPUs"),
        ("two_equal_nodes", range(8), 1, "this process may use none of the CPUs of node 1"),
    ],
)
def test_k5_a_node_that_cannot_be_had_is_a_clear_error(name, cpus, node, problem) -> None:
    with pytest.raises(QuireError) as caught:
        choose_node(node, machine(name, frozenset(cpus)), None)
    assert caught.value.reason == Reason.INVALID_FIELD
    assert caught.value.message == f"numa_node: {problem}"


def test_a_kernel_that_shows_no_nodes() -> None:
    assert choose_node("auto", EMPTY, None).node is None
    with pytest.raises(QuireError, match="nodes of this machine: none"):
        choose_node(0, EMPTY, None)


def test_the_gpu_s_node() -> None:
    topology = machine("eight_gpus_two_nodes")
    choice = choose_node("auto", topology, topology.gpus[5])
    assert (choice.node, choice.cpus, choice.asks_memory) == (1, topology.node(1).cpus, True)
    assert topology.gpus[5].address in choice.why
    assert choose_node(0, topology, topology.gpus[5]).node == 0, "what is asked for wins"


def test_a_gpu_that_firmware_does_not_place_chooses_nothing() -> None:
    topology = machine("eight_gpus_two_nodes")
    assert choose_node("auto", topology, replace(topology.gpus[0], node=None)).node is None


def test_a_gpu_beside_a_node_without_usable_cpus_takes_the_nearest() -> None:
    gpu = machine("eight_gpus_two_nodes").gpus[0]
    topology = machine("four_unequal_nodes", frozenset({0, 12}))  # of nodes 0 and 3
    assert choose_node("auto", topology, replace(gpu, node=2)).node == 3


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS, errno.EINVAL])
@pytest.mark.parametrize(
    ("refusals", "left", "problems"),
    [
        ({"prefer_error"}, (True, False), "memory: never"),
        ({"pin_error"}, (False, True), "threads: no"),
        ({"pin_error", "prefer_error"}, (False, False), "threads: no; memory: never"),
    ],
)
def test_k5_what_the_kernel_refuses_is_one_warning_and_a_metric(caplog, error, refusals, left, problems) -> None:
    topology, registry = machine("two_equal_nodes"), CollectorRegistry()
    kernel = FakeKernel(**dict.fromkeys(refusals, error))
    binding = bind(choose_node(1, topology, None), topology, kernel)
    assert binding == Binding(1, *left)
    (record,) = caplog.records
    assert (record.levelno, record.node, record.what) == (logging.WARNING, 1, problems)
    ExecutorMetrics(registry).numa_bound(1, binding.threads, binding.memory)
    for part, bound in zip(("threads", "memory"), left, strict=True):
        assert registry.get_sample_value("quire_executor_numa_bound", {"node": "1", "part": part}) == bound


def test_where_the_pool_lies() -> None:
    assert cpu_pool_place(machine("one_node")) == PoolPlace(0, 10)
    assert cpu_pool_place(machine("two_equal_nodes")) == PoolPlace(-1, 0)
    assert cpu_pool_place(machine("two_equal_nodes", frozenset({9}))) == PoolPlace(1, 10)
    assert cpu_pool_place(machine("grace_hopper")) == PoolPlace(0, 10)
    assert cpu_pool_place(EMPTY) == PoolPlace(-1, 10)
    gpu = machine("eight_gpus_two_nodes").gpus[7]
    assert gpu_pool_place(gpu) == PoolPlace(1, 10)
    assert gpu_pool_place(replace(gpu, node=None)) == gpu_pool_place(None) == PoolPlace(-1, 10)


def devices(*minors: int) -> list[Path]:
    return [Path(f"/dev/nvidia{minor}") for minor in minors]


@pytest.mark.parametrize(
    ("minors", "environment", "position"),
    [
        (range(8), {}, 0),
        (range(8), {"CUDA_VISIBLE_DEVICES": "6,1"}, 6),
        (range(8), {"CUDA_VISIBLE_DEVICES": "GPU-00000003"}, 3),
        (range(8), {"CUDA_VISIBLE_DEVICES": "GPU-0000000"}, None),  # of eight
        (range(8), {"CUDA_VISIBLE_DEVICES": "8"}, None),
        (range(8), {"CUDA_VISIBLE_DEVICES": "MIG-1"}, None),
        ([1], {}, 5),  # a container with one of the eight
        ([1, 3], {"CUDA_VISIBLE_DEVICES": "1"}, 7),
        ([], {}, None),
    ],
)
def test_which_gpu_is_cuda_s_first(minors, environment, position) -> None:
    gpus = machine("eight_gpus_two_nodes").gpus
    expected = None if position is None else gpus[position]
    assert first_cuda_gpu(gpus, devices(*minors), environment) == expected


def test_unlike_gpus_are_numbered_by_cuda_alone() -> None:
    first, *others = machine("eight_gpus_two_nodes").gpus
    gpus = [replace(first, device="0x1db4"), *others]
    assert first_cuda_gpu(gpus, devices(*range(8)), {}) is None
    assert first_cuda_gpu(gpus, devices(*range(8)), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == gpus[0]


def test_gpus_without_a_driver_s_word_are_all_candidates() -> None:
    (gpu,) = machine("grace_hopper").gpus
    assert first_cuda_gpu([gpu, replace(gpu, vendor="amd")], devices(0), {}) == gpu


def test_settings() -> None:
    def node(value: object) -> object:
        return ExecutorSettings.model_validate({"numa_node": value}).numa_node

    assert [node("auto"), node("none"), node("3"), node(0)] == ["auto", "none", 3, 0]
    for wrong in ("", "-1", "1.5", "all", 10**9):
        with pytest.raises(ValueError, match="numa_node"):
            node(wrong)


def test_a_gpu_may_compute_only_where_torch_does() -> None:
    assert not may_use_gpu(ExecutorSettings.model_validate({"backend": "cpu"}))
    assert not may_use_gpu(ExecutorSettings.model_validate({"instruction_set": "portable"}))
