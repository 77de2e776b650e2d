"""What a check found: a row for each figure, against its goal where it has one."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Row:
    """One figure."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    bound: Literal["at least", "at most"] = "at least"

    @property
    def verdict(self) -> str:
        """ "ok" or "missed"; empty where there is no goal."""
        if self.goal is None:
            return ""
        reached = self.value >= self.goal if self.bound == "at least" else self.value <= self.goal
        return "ok" if reached and math.isfinite(self.value) else "missed"


@dataclass(frozen=True, slots=True)
class PartReport:
    """A part's rows, and what ended it early: a fault, or its time."""

    part: str
    seconds: float
    rows: Sequence[Row]
    ended_by: str = ""


def table(parts: Sequence[PartReport]) -> str:
    """All of it, for people."""
    lines = [("part", "what", "found", "goal", "")]
    for part in parts:
        for row in part.rows:
            goal = "" if row.goal is None else f"{row.bound} {row.goal:g}"
            lines.append((part.part, row.name, f"{row.value:.4g} {row.unit}".rstrip(), goal, row.verdict))
        if part.ended_by:
            lines.append((part.part, part.ended_by.splitlines()[0][:100], "", "", "CUT SHORT"))
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def write(path: Path, about: dict[str, Any], parts: Sequence[PartReport]) -> None:
    """The same as JSON, in place of what was there."""
    found = [
        {"part": part.part, "seconds": round(part.seconds, 2), "ended_by": part.ended_by,
         "rows": [asdict(row) | {"verdict": row.verdict} for row in part.rows]}
        for part in parts
    ]  # fmt: skip
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(about | {"parts": found}, indent=1))
    draft.replace(path)


def read(path: Path) -> list[PartReport]:
    """The parts of such a file; none where there is none."""
    if not path.exists():
        return []
    fields = ("name", "value", "unit", "goal", "bound")
    return [
        PartReport(part["part"], part["seconds"], [Row(*(row[name] for name in fields)) for row in part["rows"]],
                   part["ended_by"])
        for part in json.loads(path.read_text())["parts"]
    ]  # fmt: skip


def failures(parts: Sequence[PartReport]) -> int:
    """Parts cut short and figures that are wrong; a speed that misses its goal is none."""
    return sum(bool(part.ended_by) for part in parts) + sum(
        row.verdict == "missed" for part in parts for row in part.rows if part.part.startswith("right")
    )
