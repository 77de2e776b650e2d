"""Weights lie on the executor's own node: those of a mapped file may lie on another."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from services.executor.backends import choose
from services.executor.backends.cpu import load_packed as loading
from services.executor.backends.cpu.backend import CpuBackend
from services.executor.memory import MemoryView
from services.executor.settings import ExecutorSettings
from tests.fixtures.models import make_rand_model
from tests.fixtures.topologies import ALL_CPUS, machine

MIB = 1 << 20
ONE_OF_TWO = machine("two_equal_nodes", frozenset({8}))


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Loads a small model for the cpu backend on an imitated machine with so many bytes free."""
    path = make_rand_model(tmp_path / "model")
    monkeypatch.setattr(loading, "derived_folder", lambda kind: tmp_path / kind)

    def run(topology, available: int) -> CpuBackend:
        monkeypatch.setattr(choose, "read_topology", lambda: topology)
        monkeypatch.setattr(choose, "measure", lambda: MemoryView(available, "machine", ()))
        settings = ExecutorSettings.model_validate({"backend": "cpu", "threads": 1})
        backend = choose.load_backend(path, settings).backend
        assert isinstance(backend, CpuBackend)
        return backend

    return run


@pytest.mark.parametrize("name", ["one_node", "two_equal_nodes", "grace_hopper"])
def test_without_another_node_to_avoid_processes_share_the_mapped_file(load, name: str) -> None:
    weights = load(machine(name, ALL_CPUS), 64 * MIB).weights
    assert weights.mapped_bytes == weights.buffer.nbytes


def test_on_one_node_of_several_weights_are_copied(load) -> None:
    mapped = load(machine("one_node"), 64 * MIB).weights
    copied = load(ONE_OF_TWO, 64 * MIB).weights
    assert copied.mapped_bytes == 0
    assert np.array_equal(copied.buffer, mapped.buffer)
    assert copied.buffer.ctypes.data % 64 == 0
    assert not copied.buffer.flags.writeable
    assert (copied.matrices, copied.vectors) == (mapped.matrices, mapped.vectors)


def test_a_copy_that_would_take_more_than_half_of_what_is_free_is_not_made(load, caplog) -> None:
    size = load(machine("one_node"), 64 * MIB).weights.buffer.nbytes
    with caplog.at_level(logging.WARNING):
        assert load(ONE_OF_TWO, 2 * size).weights.mapped_bytes == 0
        assert not caplog.records
        assert load(ONE_OF_TWO, 2 * size - 2).weights.mapped_bytes == size
    (record,) = caplog.records
    assert "another NUMA node" in record.message
