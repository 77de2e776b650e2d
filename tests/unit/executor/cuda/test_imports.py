"""What computes needs neither native code nor stubs, so that the check runs where only torch and triton are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
SCRIPT = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("google", "grpc", "pydantic", "prometheus_client", "safetensors") or name in (
            "kernels._native", "quire.v1"
        ):
            raise ImportError(f"{name} must not be needed")
        return None

sys.meta_path.insert(0, Refused())
import benchmarks.gpu.check
import services.executor.backends.cuda.backend
import services.executor.backends.torch_backend
"""


def test_the_check_and_both_backends_import_without_stubs_and_native_code() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
