"""Free memory and KV size, on imitated machines (K5)."""

import pytest

from services.common.errors import QuireError
from services.common.kv_policy import KvPolicy
from services.executor.capacity import KvDemand, kv_shape
from services.executor.memory import measure

GIB = 1 << 30


def machine(root, available, nodes=(), group=None, version=2, nested=None):
    """`nodes`: (cpulist, free bytes); `group`: (limit, used, inactive file) of the mount or of `nested` below it."""
    files = {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {available // 1024} kB\n"}
    for at, (cpus, free) in enumerate(nodes):
        files[f"sys/devices/system/node/node{at}/cpulist"] = cpus + "\n"
        files[f"sys/devices/system/node/node{at}/meminfo"] = (
            f"Node {at} MemTotal: {free // 512} kB\n"
            f"Node {at} MemFree: {free // 2048} kB\nNode {at} Inactive(file): {free // 2048} kB\n"
        )
    if group is not None:
        limit, used, inactive = group
        base = "sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory"
        base += f"/{nested}" if nested else ""
        names = ("memory.max", "memory.current", "inactive_file")
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        files["proc/self/cgroup"] = "0::/a/b\n" if version == 2 else "3:cpu,memory:/a/b\n"
        files[f"{base}/{names[0]}"] = f"{limit}\n"
        files[f"{base}/{names[1]}"] = f"{used}\n"
        files[f"{base}/memory.stat"] = f"other 1\n{names[2]} {inactive}\n"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_plain_machine(tmp_path):
    view = measure(machine(tmp_path, 8 * GIB), frozenset({0, 1}))
    assert (view.available, view.bound, view.nodes) == (8 * GIB, "machine", ())


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("nested", [None, "a", "a/b"])
def test_control_group_bounds(tmp_path, version, nested):
    view = measure(machine(tmp_path, 8 * GIB, group=(3 * GIB, GIB, GIB // 2), version=version, nested=nested))
    assert (view.available, view.bound) == (5 * GIB // 2, "control group")


@pytest.mark.parametrize(("version", "limit"), [(2, "max"), (1, 9223372036854771712)])
def test_unlimited_control_group(tmp_path, version, limit):
    view = measure(machine(tmp_path, 8 * GIB, group=(limit, GIB, 0), version=version))
    assert view.bound == "machine"


def test_overdrawn_control_group_leaves_nothing(tmp_path):
    assert measure(machine(tmp_path, 8 * GIB, group=(GIB, 2 * GIB, 0))).available == 0


@pytest.mark.parametrize(
    ("cpus", "available", "nodes"),
    [({0, 1}, 2 * GIB, (0,)), ({2}, 4 * GIB, (1,)), ({0, 1, 2, 3}, 8 * GIB, (0, 1)), ({1, 2}, 8 * GIB, (0, 1))],
)
def test_k5_bound_process_sees_its_own_nodes_memory(tmp_path, cpus, available, nodes):
    root = machine(tmp_path, 8 * GIB, nodes=[("0-1", 2 * GIB), ("2-3", 4 * GIB)])
    view = measure(root, frozenset(cpus))
    assert (view.available, view.nodes) == (available, nodes)


def test_k5_memory_of_nodes_without_cpus_does_not_count(tmp_path):
    root = machine(tmp_path, 8 * GIB, nodes=[("0-3", 2 * GIB), ("", 4 * GIB)])
    view = measure(root, frozenset({0}))
    assert (view.available, view.bound, view.nodes) == (2 * GIB, "NUMA nodes", (0,))


def test_a_single_node_bounds_nothing(tmp_path):
    view = measure(machine(tmp_path, 8 * GIB, nodes=[("0-3", 2 * GIB)]), frozenset({0}))
    assert (view.available, view.bound, view.nodes) == (8 * GIB, "machine", (0,))


def test_this_machine_has_memory():
    assert measure().available > 0


def demand(**fields):
    return KvDemand(**{"block_size": 32, "max_sequences": 4, "context_length": 100, **fields})


def test_automatic_size_is_a_quarter_but_no_more_than_can_be_used():
    assert kv_shape(demand(), [1000], 40_000).block_count == 10
    assert kv_shape(demand(), [1000], 10**9).block_count == 4 * 4


def test_stated_sizes():
    assert kv_shape(demand(memory=5500), [1000], 10_000).block_count == 5
    assert kv_shape(demand(blocks=7, memory=1), [1000], 0).block_count == 7


@pytest.mark.parametrize("fields", [{}, {"memory": 100}, {"memory": 10**9}])
def test_what_does_not_fit_is_refused(fields):
    with pytest.raises(QuireError, match="kv_memory"):
        kv_shape(demand(**fields), [1000], 3000)


AGES = KvPolicy.parse("hot:64,int8:320,int4")
SIZES = [1000, 500, 300]


@pytest.mark.parametrize("fields", [{}, {"memory": 900_000}, {"context_length": 100}, {"max_sequences": 1}])
def test_pools_of_several_formats_share_the_memory(fields):
    asked = demand(**{"policy": AGES, "context_length": 1000, **fields})
    shape = kv_shape(asked, SIZES, 4_000_000)
    counts = [shape.block_count, *(pool.block_count for pool in shape.colder)]
    assert [pool.format for pool in shape.colder] == ["int8", "int4"]
    assert [shape.block_bytes, *(pool.block_bytes for pool in shape.colder)] == SIZES
    assert shape.pool_starts == (0, counts[0], sum(counts[:2]), sum(counts))
    budget = asked.memory or 1_000_000
    assert min(counts) >= 1
    assert shape.byte_count <= budget + sum(SIZES[1:])
    if asked.context_length > 500:  # a whole sequence fits, and more of it as memory grows
        assert all(count >= needed for count, needed in zip(counts, AGES.counts(32, asked.context_length), strict=True))


def test_a_stated_number_of_blocks_is_that_of_each_format():
    shape = kv_shape(demand(policy=AGES, blocks=7), SIZES, 0)
    assert shape.pool_starts == (0, 7, 14, 21)
