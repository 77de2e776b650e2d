"""The rule that skips are counted, shown on a small project with the same conftest."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LISTED = "test_it.py::test_a*: no such device\ntest_module.py: no such library\n"
pytest_plugins = ["pytester"]


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """One test that passes; one, and a module, that are skipped."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text())
    pytester.makepyfile(
        test_it="""
        import pytest
        def test_runs(): pass
        @pytest.mark.parametrize("n", [1])
        def test_a(n): pytest.skip("no device")
        """,
        test_module="""
        import pytest
        pytest.importorskip("no_such_library")
        def test_b(): pass
        """,
    )
    return pytester


def run(project: pytest.Pytester, rules: str, *options: str) -> tuple[int, str]:
    """Exit status and output."""
    project.path.joinpath("allowed_skips.txt").write_text(rules)
    done = project.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:hypothesispytest", *options)
    return int(done.ret), done.stdout.str()


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("missing", [None, 0, 1])
def test_only_listed_skips_pass(project: pytest.Pytester, missing: int | None, workers: str) -> None:
    rules = [line for at, line in enumerate(LISTED.splitlines()) if at != missing]
    status, text = run(project, "\n".join(rules), "--numprocesses", workers)
    assert status == (missing is not None)
    assert f"= 2 skipped, {status} of them not allowed =" in text
    assert re.search(r"^(NOT )?allowed.*: test_it.py::test_a\[1\]: no device$", text, re.M | re.I)
    assert re.search(r"^(NOT )?allowed.*: test_module.py: could not import 'no_such_library'", text, re.M | re.I)
    assert re.search(r"^=+ 1 passed, 2 skipped in [^\n]* =+\s*\Z", text, re.M)  # the last line


def test_a_rule_needs_a_reason(project: pytest.Pytester) -> None:
    status, _ = run(project, "tests/*\n")
    assert status == pytest.ExitCode.USAGE_ERROR
