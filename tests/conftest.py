"""Skips are counted, so that a test that stops running is noticed; and what runs leave behind goes away with them.

tests/allowed_skips.txt names every test that may be skipped somewhere, each with the reason. A skip that is not in the
list fails the run.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc.aio import init_grpc_aio

from services.executor.openmp import yield_soon

yield_soon()  # before any test imports torch
# Held for the whole run. Else it ends with its last object, wherever the garbage collector happens to find that, and
# waits there for calls that a test left behind in a loop that is closed.
init_grpc_aio()
pytest_plugins = ["tests.workers"]
ALLOWED = Path(__file__).with_name("allowed_skips.txt")


def allowed_skips(text: str) -> dict[str, str]:
    """Patterns of test ids with their reasons, from lines `PATTERN: REASON`; # begins a comment."""
    rules = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        pattern, separator, reason = line.partition(": ")
        if not separator or not reason.strip():
            raise pytest.UsageError(f"{ALLOWED.name}: {line!r} has no reason; write PATTERN: REASON")
        rules[pattern.strip()] = reason.strip()
    return rules


class SkipCount:
    """Collects what was skipped, and fails the run where a skip is not allowed."""

    def __init__(self, rules: dict[str, str]) -> None:
        self._rules = rules
        self.skipped: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._add(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._add(report)

    def _add(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        self.skipped[report.nodeid] = str(reason).removeprefix("Skipped: ")

    @property
    def unexpected(self) -> list[str]:
        def allowed(test: str) -> bool:
            # A parameter's brackets are literal in a test id; in a pattern only * and ? are special.
            return any(fnmatch.fnmatchcase(test, pattern.replace("[", "[[]")) for pattern in self._rules)

        return [test for test in self.skipped if not allowed(test)]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unexpected and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"{len(self.skipped)} skipped, {len(self.unexpected)} of them not allowed")
        unexpected = set(self.unexpected)
        for test, reason in sorted(self.skipped.items()):
            verdict = f"NOT ALLOWED (add it to {ALLOWED.name} with its reason)" if test in unexpected else "allowed"
            terminalreporter.write_line(f"{verdict}: {test}: {reason}")


def pytest_configure(config: pytest.Config) -> None:
    # Packed weights and tokenizers of hundreds of small models do not belong in the user's cache.
    folder = tempfile.TemporaryDirectory(prefix="quire-derived-")
    config.add_cleanup(folder.cleanup)
    os.environ["QUIRE_DERIVED"] = folder.name
    if not hasattr(config, "workerinput"):  # a worker's reports reach the process that started it
        config.pluginmanager.register(SkipCount(allowed_skips(ALLOWED.read_text())), "skip-count")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Undoes what a service that ran in this process did to logging: its handler writes to a captured stream that ends
    with the test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
