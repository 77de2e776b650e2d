"""Kernels compile for GPUs that are not there, and a compiler's complaint fails the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def compile_kernels(cache: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tools/compile_kernels.py", *options],
        cwd=ROOT,
        env=os.environ | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )


def test_a_variant_of_each_kernel_compiles(tmp_path: Path) -> None:
    done = compile_kernels(tmp_path, "--quick", "--targets", "90")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok (") == len(list((ROOT / "tools/kernel_cases").glob("[a-z]*.py")))
    assert "(0 kernels" not in done.stdout


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_every_kernel_compiles_for_both_targets(tmp_path: Path) -> None:
    done = compile_kernels(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_a_compiler_refuses_fails(tmp_path: Path) -> None:
    """sm_50 is too old for anything; the tool has no figure of its shared memory either."""
    done = compile_kernels(tmp_path, "--quick", "--targets", "50", "--only", "kv_blocks")
    assert done.returncode == 1
    assert "kv_blocks: copy: " in done.stdout
    assert ": ok" not in done.stdout
