"""docker-compose.yml and the Dockerfile, without a Docker engine: linted, parsed, and run as local processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml

from quire.v1 import gateway_pb2, gateway_pb2_grpc, types_pb2
from tests.e2e.stack import free_port, is_serving
from tests.fixtures.models import make_succ_model

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OURS = {name: service for name, service in COMPOSE["services"].items() if "build" in service}
ROLES = {"gateway", "scheduler", "kvmanager", "executor"}


def stage(name: str) -> str:
    """The Dockerfile's lines of one stage."""
    found = re.search(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.M | re.S)
    assert found, name
    return found[1]


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, "--failure-threshold", "style", ROOT / "Dockerfile"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
def test_compose_accepts_the_file() -> None:
    done = subprocess.run(
        ["docker-compose", "--file", ROOT / "docker-compose.yml", "config"], capture_output=True, text=True, check=True
    )
    assert set(yaml.safe_load(done.stdout)["services"]) == ROLES | {"redis"}


def test_every_role_has_a_target_without_root_and_with_a_health_check() -> None:
    assert set(OURS) == ROLES
    for role, service in OURS.items():
        assert service["build"]["target"] == role
        own = stage(role)
        parent = re.search(rf"^FROM (\S+) AS {role}$", DOCKERFILE, re.M)
        assert parent
        user = own if parent[1] == "base" else stage(parent[1])
        assert re.search(r"^USER (?!0$|root$)\d+$", user, re.M), role
        assert "HEALTHCHECK" in own
        assert service["command"] == [role]


def test_light_targets_have_no_torch() -> None:
    assert "requirements-light.lock" in stage("light")
    for role in ROLES - {"executor"}:
        assert f"FROM light AS {role}" in DOCKERFILE
        assert "pip install" not in stage(role)


def test_the_build_has_what_it_copies() -> None:
    sent = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.M)
    copied = [name for names in re.findall(r"^COPY (?!--)(.*) \S+$", DOCKERFILE, re.M) for name in names.split()]
    assert sorted(sent) == sorted(copied)
    assert all((ROOT / name).exists() for name in sent)


def test_images_have_no_compiler() -> None:
    assert re.findall(r"^FROM \S+ AS (\S+)\n(?:(?!^FROM ).*\n)*?.*apt-get install", DOCKERFILE, re.M) == ["build"]


def test_base_images_are_pinned() -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.M))
    images = [i for i in re.findall(r"^FROM (\S+)", DOCKERFILE, re.M) if i not in stages]
    images.append(COMPOSE["services"]["redis"]["image"])
    for image in images:
        assert re.search(r":\d+\.\d+", image), image


def test_only_the_gateway_is_published_and_only_on_loopback() -> None:
    published = {name: service["ports"] for name, service in COMPOSE["services"].items() if "ports" in service}
    assert set(published) == {"gateway"}
    assert all(port.startswith("127.0.0.1:") for port in published["gateway"])


class Remap:
    """Gives every (service, port) of the compose file a free port on this machine."""

    def __init__(self) -> None:
        self._ports: dict[tuple[str, str], int] = {}

    def address(self, service: str, port: str) -> str:
        return f"127.0.0.1:{self._ports.setdefault((service, port), free_port())}"

    def value(self, service: str, text: str) -> str:
        """A setting with its addresses moved: own ones by `service`, others by the name they carry."""
        text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
        text = re.sub(r"^(?:0\.0\.0\.0|127\.0\.0\.1):(\d+)$", lambda m: self.address(service, m[1]), text)
        names = "|".join(OURS)
        return re.sub(rf"(?:dns:///)?\b({names}):(\d+)", lambda m: self.address(m[1], m[2]), text)


def died(running: dict[str, subprocess.Popen[bytes]], logs: Path) -> str:
    """What the services that ended had to say."""
    return "\n".join(f"{n}: {(logs / n).read_text()[-2000:]}" for n, p in running.items() if p.poll() is not None)


@contextmanager
def composed(model: Path, logs: Path) -> Iterator[tuple[Remap, dict[str, subprocess.Popen[bytes]]]]:
    """All services as the compose file states them, with a small model in place of the default one."""
    remap = Remap()
    found = re.search(r"^ENTRYPOINT (\[.*\])$", stage("base"), re.M)
    assert found
    entrypoint = json.loads(found[1])
    assert entrypoint[0] == "quire"
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, service in OURS.items():
            settings = {key: remap.value(name, value) for key, value in service["environment"].items()}
            if "QUIRE_EXECUTOR_MODEL" in settings:
                settings |= {"QUIRE_EXECUTOR_MODEL": str(model), "QUIRE_EXECUTOR_MODEL_NAME": "tiny"}
            clean = {key: value for key, value in os.environ.items() if not key.startswith("QUIRE_")}
            command = [sys.executable, "-m", "quire.cli", *entrypoint[1:], *service["command"]]
            with (logs / name).open("wb") as log:
                running[name] = subprocess.Popen(command, env={**clean, **settings}, stdout=log, stderr=log)
        yield remap, running
        assert not died(running, logs)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()


def test_services_work_as_composed(tmp_path: Path) -> None:
    """Every service starts from its stated command and environment, passes its health check, and answers clients."""
    model = make_succ_model(tmp_path / "model", {ord(a): ord(b) for a, b in pairwise("abcd")})
    with composed(model, tmp_path) as (remap, running):
        for name, service in OURS.items():
            kind, *command = [remap.value(name, part) for part in service["healthcheck"]["test"]]
            assert (kind, command[:2]) == ("CMD", ["quire", "health"])
            deadline = time.monotonic() + 60
            while not is_serving(command[2]):
                assert all(process.poll() is None for process in running.values()), died(running, tmp_path)
                assert time.monotonic() < deadline, f"{name}: {(tmp_path / name).read_text()[-2000:]}"
                time.sleep(0.1)
            subprocess.run([sys.executable, "-m", "quire.cli", *command[1:]], check=True)
        address = {port: remap.address("gateway", port) for port in ("50051", "8000", "9101")}
        with grpc.insecure_channel(address["50051"]) as channel:
            asked = gateway_pb2.GenerationInput(
                text="a",
                sampling=types_pb2.SamplingParams(temperature=0),
            )
            stub = gateway_pb2_grpc.InferenceServiceStub(channel)
            answer = stub.Generate(gateway_pb2.GenerateRequest(input=asked), timeout=30, wait_for_ready=True)
            assert answer.choices[0].text == "bcd"
        models = httpx.get(f"http://{address['8000']}/v1/models").raise_for_status().json()
        assert [entry["id"] for entry in models["data"]] == ["tiny"]
        assert "# HELP" in httpx.get(f"http://{address['9101']}/metrics").raise_for_status().text
