"""`quire usage`: the days that are asked for, a table and JSON."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from quire import cli
from quire.v1 import admin_pb2
from tests.unit.cli.conftest import Gateway

ROW = admin_pb2.UsageRow(
    day="2026-01-02",
    tenant="acme",
    model="m",
    request_count=3,
    prompt_tokens=12_000,
    cached_tokens=4_000,
    output_tokens=500,
)


def test_a_table_and_json(gateway: tuple[Gateway, str], capsys: pytest.CaptureFixture[str]) -> None:
    made, address = gateway
    assert cli.main(["usage", "--address", address]) == 0
    assert capsys.readouterr().out == "nothing was used\n"
    made.usage = [ROW]
    assert cli.main(["usage", "--address", address]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["DAY", "TENANT", "MODEL", "REQUESTS", "PROMPT", "CACHED", "OUTPUT"]
    assert shown[1].split() == ["2026-01-02", "acme", "m", "3", "12,000", "4,000", "500"]
    assert cli.main(["usage", "--json", "--address", address]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert (row["tenant"], row["request_count"], row["output_tokens"]) == ("acme", 3, 500)


@pytest.mark.parametrize(
    ("flags", "first", "last"),
    [
        (["--to", "2026-03-01", "--days", "2"], "2026-02-28", "2026-03-01"),
        (["--from", "2026-01-01", "--to", "2026-01-31", "--tenant", "acme"], "2026-01-01", "2026-01-31"),
        (["--from", "2026-01-01"], "2026-01-01", "today"),
    ],
)
def test_the_days(gateway: tuple[Gateway, str], flags: list[str], first: str, last: str) -> None:
    made, address = gateway
    before = datetime.now(UTC).date()
    assert cli.main(["usage", "--address", address, *flags]) == 0
    [asked] = made.usage_asked
    allowed = {before.isoformat(), (before + timedelta(days=1)).isoformat()} if last == "today" else {last}
    assert asked.first_day == first
    assert asked.last_day in allowed
    assert asked.tenant == ("acme" if "--tenant" in flags else "")


@pytest.mark.parametrize("flags", [["--days", "0"], ["--from", "soon"], ["--days", "2", "--from", "2026-01-01"]])
def test_wrong_days_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["usage", *flags])
    assert end.value.code == 2
