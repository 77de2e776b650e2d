"""What generates code, what is locked and what the package asks for must agree."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = ["requirements.lock", "requirements-light.lock", "requirements-executor.lock"]


def locked(name: str) -> dict[str, Version]:
    lines = (ROOT / name).read_text().splitlines()
    parsed = [Requirement(line) for line in lines if not line.startswith("#")]
    return {one.name: Version(str(one.specifier).removeprefix("==")) for one in parsed}


def test_generators_are_pinned_to_the_lock() -> None:
    pins = locked("requirements.lock")
    for text in PROJECT["build-system"]["requires"]:
        requirement = Requirement(text)
        assert str(requirement.specifier) == f"=={pins[requirement.name]}", text


def test_the_runtime_is_never_older_than_the_generated_code() -> None:
    stubs = "\n".join(path.read_text() for path in (ROOT / "quire" / "v1").glob("*.py"))
    (grpc,) = set(re.findall(r"GRPC_GENERATED_VERSION = '([\d.]+)'", stubs))
    (protobuf,) = set(re.findall(r"# Protobuf Python Version: ([\d.]+)", stubs))
    wanted = {r.name: r for r in map(Requirement, PROJECT["project"]["dependencies"])}
    for name, generated in (("grpcio", grpc), ("protobuf", protobuf)):
        lowest = next(s.version for s in wanted[name].specifier if s.operator == ">=")
        assert Version(lowest) >= Version(generated), name


@pytest.mark.parametrize("name", LOCKS)
def test_locks_name_releases_only(name: str) -> None:
    text = (ROOT / name).read_text()
    body = [line for line in text.splitlines() if not line.startswith("#")]
    assert body
    for line in body:
        assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*==[0-9][0-9a-z.]*( ; .*)?", line), line


@pytest.mark.parametrize(
    ("name", "extras"), [*zip(LOCKS, [("torch", "test"), ("oidc",), ("torch", "cuda")], strict=True)]
)
def test_locks_satisfy_the_package(name: str, extras: tuple[str, ...]) -> None:
    pins = locked(name)
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *(r for e in extras for r in project["optional-dependencies"][e])]
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(pins[requirement.name]), requirement


def test_light_images_have_no_torch() -> None:
    assert not {"torch", "triton", "transformers"} & set(locked("requirements-light.lock"))


def test_locks_agree() -> None:
    everything = locked("requirements.lock")
    for name in LOCKS[1:]:
        both = everything.keys() & locked(name).keys()
        assert {n: everything[n] for n in both} == {n: locked(name)[n] for n in both}


def imports(folder: Path) -> set[str]:
    """Top-level names that the Python files below a folder import."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found


def test_every_import_is_a_declared_dependency() -> None:
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    declared = {"pydantic-core"}  # pydantic pins it and is declared
    declared |= {
        Requirement(text).name
        for text in [*project["dependencies"], *extras["torch"], *extras["cuda"], *extras["oidc"], *extras["plot"]]
    }
    providers = packages_distributions()
    for package in ("quire", "services", "kernels"):
        for name in imports(ROOT / package) - set(sys.stdlib_module_names) - {"quire", "services", "kernels"}:
            names = {one.lower().replace("_", "-") for one in providers[name]}
            assert names & declared, f"{package} imports {name}"
