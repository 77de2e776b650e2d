"""How native code is built: what the machine must have, what may not be in it, how it is installed."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
HEADERS = Path(sysconfig.get_path("include"))


def tool(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module(name)


def test_this_machine_has_what_compiling_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tool("native_needs", monkeypatch).missing(os.environ, HEADERS) == {}


def test_what_is_missing_is_named_by_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = tool("native_needs", monkeypatch).missing
    headers = "python{}.{}-dev".format(*sys.version_info)
    assert set(missing({"PATH": ""}, tmp_path)) == {"g++", headers}
    assert set(missing({"PATH": os.environ["PATH"], "CXX": "no-such-compiler -pipe"}, HEADERS)) == {"g++"}
    (tmp_path / "my-compiler").touch(0o755)
    assert missing({"PATH": str(tmp_path), "CXX": "my-compiler -pipe"}, HEADERS) == {}


def test_setup_stops_where_something_is_missing(tmp_path: Path) -> None:
    """On a machine without apt: both the need and the remedy are said."""
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "native_needs.py"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "a C++ compiler" in done.stderr
    assert "apt-get install g++" in done.stderr


@pytest.mark.parametrize(("attributes", "found"), [("noinline", ["shared(int)"]), ("always_inline", [])])
def test_functions_that_the_linker_shares_are_found(
    attributes: str, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    assert compiler
    source = tmp_path / "one.cpp"
    source.write_text(
        f"inline __attribute__(({attributes})) int shared(int x) {{ return x * x; }}\n"
        "static __attribute__((noinline)) int own(int x) { return x + shared(x); }\n"
        "int kernel(int x) { return own(x) - shared(x + 1); }\n"
    )
    folder = tmp_path / "CMakeFiles" / "kernels_avx2.dir"
    folder.mkdir(parents=True)
    subprocess.run([compiler, "-O2", "-c", source, "-o", folder / "one.cpp.o"], check=True)
    symbols = tool("isa_symbols", monkeypatch)
    (path,) = symbols.objects(tmp_path)
    assert symbols.weak_functions(symbols.listing(path)) == found


def test_nothing_compiled_is_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="make native"):
        list(tool("isa_symbols", monkeypatch).objects(tmp_path))


def test_an_editable_install_is_one_path_entry() -> None:
    files = distribution("quire-llm").files or []
    installed = [path for path in files if ".dist-info" not in path.parts[0] and path.parts[-2:-1] != ("bin",)]
    assert [str(path) for path in installed] == ["quire.pth"]
    assert installed[0].read_text() == f"{ROOT}\n"


def test_tests_can_run_on_another_build(tmp_path: Path) -> None:
    native = importlib.import_module("kernels._native")
    other = shutil.copy(native.__file__, tmp_path)
    test = tmp_path / "test_it.py"
    test.write_text(f"from kernels import _native\ndef test_it(): assert _native.__file__ == {str(other)!r}\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.fixtures.other_native", "--native", other, test]
    bare = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([*command, f"--rootdir={tmp_path}"], cwd=ROOT, env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"kernels._native: {other}" in done.stdout
