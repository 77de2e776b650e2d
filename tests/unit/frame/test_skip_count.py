"""The rule that skips are counted, shown on a small project with the same conftest."""

import re
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[2] / "conftest.py"
pytest_plugins = ["pytester"]


@pytest.mark.parametrize(("rules", "status"), [("other: reason", 1), ("test_it.py::test_a*: no such device", 0)])
def test_only_listed_skips_pass(pytester: pytest.Pytester, rules: str, status: int) -> None:
    pytester.makeconftest(CONFTEST.read_text())
    pytester.path.joinpath("allowed_skips.txt").write_text(rules)
    pytester.makepyfile(
        test_it="""
        import pytest
        def test_runs(): pass
        @pytest.mark.parametrize("n", [1])
        def test_a(n): pytest.skip("no device")
        """
    )
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    assert done.ret == status
    text = done.stdout.str()
    assert re.search(rf"1 skipped, {status} of them not allowed", text)
    assert "test_it.py::test_a[1]: no device" in text


def test_a_rule_needs_a_reason(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST.read_text())
    pytester.path.joinpath("allowed_skips.txt").write_text("tests/*\n")
    done = pytester.runpytest_subprocess()
    assert done.ret == pytest.ExitCode.USAGE_ERROR
