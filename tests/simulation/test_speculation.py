"""Drafts in virtual time: the scheduler, its controller and credit against what theory says of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire import cli
from quire.simulation.drafts import Drafts
from services.common.speculation import MAX_DRAFT_TOKENS
from services.executor.cost_model import CostModel
from tests.simulation.scenarios import equal_requests, run, scenario

STEP, TOKEN, PART = 0.010, 0.0001, 0.1
"""Seconds of a step and of each draft that it verifies; what a step of the draft takes of it."""
MACHINE = {"cost": CostModel(STEP, 0.0, 0.0, TOKEN, 0.0)}


def closed_form(chance: float, drafts: int) -> float:
    """How many times as fast (Leviathan et al. 2023, theorem 3.8), with what verifying takes."""
    tokens = (1 - chance ** (drafts + 1)) / (1 - chance)
    return tokens / (1 + drafts * (PART + TOKEN / STEP))


def report(chances: tuple[float, ...], speculation: str, concurrency: int = 1, machine: Any = None) -> dict[str, Any]:
    what = scenario(
        equal_requests(2 * concurrency, 16, 600, concurrency), machine=machine or MACHINE, drafts=Drafts(chances, PART)
    )
    return run(what, speculation=speculation).report


@pytest.mark.parametrize("chance", [0.3, 0.8, 0.95])
@pytest.mark.parametrize("drafts", ["4", "8", "auto"])
def test_it_reaches_what_the_closed_form_says(chance: float, drafts: str) -> None:
    """Nine tenths of it at the least; the best of all lengths where it is chosen."""
    plain, drafted = report((chance,), "off"), report((chance,), drafts)
    assert drafted["failures"] == {}
    measured = drafted["output_tok_s"] / plain["output_tok_s"]
    lengths = range(MAX_DRAFT_TOKENS + 1) if drafts == "auto" else [int(drafts)]
    expected = max(closed_form(chance, length) for length in lengths)
    assert measured >= 0.9 * expected
    assert drafts == "auto" or measured <= 1.1 * expected


@pytest.mark.parametrize("concurrency", [1, 8, 32])
@pytest.mark.parametrize("chances", [(0.9,), (0.0,), (0.95, 0.0)])
def test_no_batch_is_slower_for_them(chances: tuple[float, ...], concurrency: int) -> None:
    """Where a token costs a third of a step of one: at least 0.98 of plain, and 0.95 of the best with learning."""
    machine = {"cost": CostModel(0.002, 0.0009, 0.0, 0.0007, 0.0), "max_sequences": 32, "block_count": 4096}
    rates = {k: report(chances, k, concurrency, machine)["output_tok_s"] for k in ("auto", "off", "2", "8")}
    assert rates["auto"] >= 0.98 * rates["off"]
    assert rates["auto"] >= 0.95 * max(rates.values())


def test_few_blocks_are_no_obstacle() -> None:
    """Drafts take blocks ahead of need; where there are none, they are left out, and everything ends."""
    tight = MACHINE | {"block_count": 40, "max_sequences": 8}
    found = report((0.7,), "16", 8, tight)
    assert found["failures"] == {}
    assert found["preemptions"] > 0
    assert found["drafts_accepted"] > 0


def test_the_command_compares_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--concurrency", "2", "--requests", "4", "--acceptance", "0.9,0.1", "--speculation", "off,4", "--json"]
    assert cli.main(["simulate", *flags]) == 0
    off, four = json.loads(capsys.readouterr().out)["policies"]
    assert (off["policy"], four["policy"]) == ("fair, drafts off", "fair, drafts 4")
    assert off["drafts_proposed"] == 0
    assert 0 < four["drafts_accepted"] < four["drafts_proposed"]


@pytest.mark.parametrize("flags", [["--speculation", "17"], ["--acceptance", "1.5"], ["--draft-cost", "-1"]])
def test_what_makes_no_sense_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", "--concurrency", "1", *flags])
    assert ended.value.code == 2
    assert flags[0] in capsys.readouterr().err
