"""The executor as a process: port before model, exit codes, drain (K4)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fixtures.models import make_rand_model

RUN = "import sys; from services.executor.main import main; sys.exit(main(sys.argv[1:]))"
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def start(tmp_path):
    processes = []

    def begin(*flags):
        listen = f"unix:{tmp_path}/executor.sock"
        command = [sys.executable, "-c", RUN, "--listen", listen, "--metrics-listen", "", "--kvmanager", "", *flags]
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        processes.append(process)
        return process, listen

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def wait_for(listen, service, status):
    deadline = time.monotonic() + 60
    with grpc.insecure_channel(listen) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline:
            try:
                if stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status == status:
                    return
            except grpc.RpcError:
                pass
            time.sleep(0.05)
    raise AssertionError(f"{service!r} did not become {status}")


@pytest.mark.parametrize("backend", ["auto", "cpu", "torch"])
def test_serves_after_warm_up_and_stops_on_a_signal(start, tmp_path, backend):
    path = make_rand_model(tmp_path / "model", 1)
    process, listen = start("--model", str(path), "--backend", backend, "--threads", "1", "--kv-blocks", "16")
    wait_for(listen, "", SERVING)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def test_k4_a_failing_model_path_exits_with_a_clear_line(start):
    process, _ = start("--model", "/nowhere/model")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2  # as for refused settings: another try would say the same
    assert any("cannot serve /nowhere/model" in line for line in errors.splitlines())


def test_what_the_backend_cannot_do_exits_with_a_clear_line(start, tmp_path):
    path = make_rand_model(tmp_path / "model", 1)
    process, _ = start("--model", str(path), "--backend", "cpu", "--block-size", "16")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert any("the cpu backend cannot serve this: block_size" in line for line in errors.splitlines())


def test_cuda_without_a_card_exits_with_a_clear_line(start, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path = make_rand_model(tmp_path / "model", 1)
    process, _ = start("--model", str(path), "--backend", "cuda")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert any("cuda backend cannot serve this: torch finds no CUDA device" in line for line in errors.splitlines())


def test_empty_executor_is_up_without_torch_and_stops_quickly(start):
    process, listen = start()
    wait_for(listen, "liveness", SERVING)
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "torch" not in maps
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
