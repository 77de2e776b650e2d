"""An executor's process and its NUMA node (K5)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from services.common.topology_sysfs import read_topology

RUN = "import sys; from services.executor.main import main; sys.exit(main(sys.argv[1:]))"
PARTS = ("memory", "threads")


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    """An executor that ends by itself."""
    command = [sys.executable, "-c", RUN, "--listen", "unix:/nowhere/x.sock", "--metrics-listen", "", "--kvmanager", ""]
    return subprocess.run(
        [*command, *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_k5_an_absent_node_is_a_clear_start_error() -> None:
    ended = run("--numa-node", "1000")
    assert ended.returncode == 2  # as for refused settings: another try would say the same
    (line,) = [line for line in ended.stderr.splitlines() if "numa_node: there is no node 1000" in line]
    assert "nodes of this machine:" in line
    assert "Traceback" not in ended.stderr


def test_what_is_no_node_is_refused_by_name() -> None:
    ended = run("--numa-node", "left")
    assert ended.returncode == 2
    assert "numa_node" in ended.stderr


def test_the_metric_says_what_is_bound(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    listen = f"unix:{tmp_path}/executor.sock"
    command = [sys.executable, "-c", RUN, "--listen", listen, "--metrics-listen", address, "--kvmanager", ""]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            text = scrape(f"http://{address}/metrics")
        finally:
            process.kill()
    nodes = [node.node_id for node in read_topology().usable]
    expected = {f'quire_executor_numa_bound{{node="{node}",part="{part}"}} 1.0' for node in nodes for part in PARTS}
    bound = {line for line in text.splitlines() if line.startswith("quire_executor_numa_bound{")}
    assert bound == (expected if len(nodes) == 1 else set())


def scrape(url: str) -> str:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return str(answer.read().decode())
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
