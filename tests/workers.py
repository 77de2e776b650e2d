"""How the tests are spread over the workers of one run (pytest-xdist).

A file goes to one worker whole, because its fixtures serve the module. Tests that start whole stacks of processes all
go to one worker, which runs them one after the other; the rest goes to whoever is free. Folders come in the order in
which work ends together: the one long queue first, then big files, then the many small ones.
"""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadScopeScheduling

STACKS = ("tests/e2e/", "tests/deploy/")
THEN = ("tests/native/", "tests/contract/", "tests/simulation/", "tests/kernels/", "tests/unit/")


def work_unit(test: str) -> str:
    """What a test id shares a worker with: its file, or all stacks."""
    return "stacks" if test.startswith(STACKS) else test.partition("::")[0]


def rank(test: str) -> int:
    """Where a test id's folder comes in the order of the run."""
    folders = (*STACKS, *THEN)
    return next((at for at, folder in enumerate(folders) if test.startswith(folder)), len(folders))


class Scheduling(LoadScopeScheduling):
    """Hands out work units in the collection's order."""

    def _split_scope(self, nodeid: str) -> str:
        return work_unit(nodeid)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: rank(item.nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Scheduling:
    config.option.loadscopereorder = False  # by the number of tests, which says little about their time
    return Scheduling(config, log)
