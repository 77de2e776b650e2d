"""How long an executor's process takes from its start to its first token.

    python -m benchmarks.start --model smollm2 --runs 5
    python -m benchmarks.start --fresh                    # nothing packed yet: each run packs the weights anew

The model's files are in the cache; the scheduler is played by this process.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import time
from statistics import median

import grpc

from quire.v1 import executor_pb2, executor_pb2_grpc, types_pb2

_POLL_SECONDS = 0.005
_DEADLINE_SECONDS = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--fresh", action="store_true", help="keep nothing from one run to the next")
    options = parser.parse_args()
    if not options.fresh:
        run(options.model, options.backend, None)  # packs, where that was never done
    seconds = []
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory() as folder:
            seconds.append(run(options.model, options.backend, folder if options.fresh else None))
            print(f"{seconds[-1]:.2f} s", file=sys.stderr)
    print(json.dumps({"model": options.model, "median_seconds": round(median(seconds), 3), "runs": seconds}))
    return 0


def run(model: str, backend: str, derived: str | None) -> float:
    """Seconds of one start. `derived` is a folder for packed weights, None the user's own."""
    target = f"127.0.0.1:{_free_port()}"
    command = [sys.executable, "-m", "quire.cli", "serve", "executor", "--listen", target, "--metrics-listen", ""]
    command += ["--kvmanager", "", "--model", model, "--backend", backend, "--log-level", "error"]
    environment = os.environ | ({"QUIRE_DERIVED": derived} if derived is not None else {})
    began = time.perf_counter()
    with subprocess.Popen(command, env=environment) as process:
        try:
            _first_token(process, target, began + _DEADLINE_SECONDS)
            return round(time.perf_counter() - began, 3)
        finally:
            process.terminate()


def _first_token(process: subprocess.Popen[bytes], target: str, deadline: float) -> None:
    with _connected(process, target, deadline) as channel:
        sent: queue.SimpleQueue[executor_pb2.RunRequest | None] = queue.SimpleQueue()
        stub = executor_pb2_grpc.ExecutorServiceStub(channel)
        answers = stub.Run(iter(sent.get, None))
        sent.put(executor_pb2.RunRequest(hello=executor_pb2.RunHello(scheduler_id="start")))
        epoch = 0
        for answer in answers:
            if answer.HasField("welcome"):
                epoch = answer.welcome.epoch
            if answer.welcome.description.HasField("model") or answer.description.HasField("model"):
                sent.put(executor_pb2.RunRequest(plan=_plan(epoch)))
            if answer.results.token_ids:
                break
        sent.put(None)


def _connected(process: subprocess.Popen[bytes], target: str, deadline: float) -> grpc.Channel:
    """A channel to the executor, as soon as its port is open."""
    host, _, port = target.rpartition(":")
    while time.perf_counter() < deadline and process.poll() is None:
        try:
            socket.create_connection((host, int(port))).close()
            return grpc.insecure_channel(target)
        except ConnectionRefusedError:
            time.sleep(_POLL_SECONDS)
    raise RuntimeError(f"no executor on {target}")


def _plan(epoch: int) -> executor_pb2.StepPlan:
    """One sequence, one token."""
    state = executor_pb2.SequenceState(
        sequence_id=1,
        token_ids=[1, 2, 3],
        prompt_length=3,
        blocks=[executor_pb2.BlockList(group_id=0, block_ids=[0])],
        sampling=types_pb2.SamplingParams(temperature=0.0, seed=0),
        stop=types_pb2.StopCriteria(max_tokens=1),
    )
    return executor_pb2.StepPlan(
        epoch=epoch, step=1, enter=[state], sequence_ids=[1], token_limits=[3], step_counts=[1]
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
