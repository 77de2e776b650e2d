"""What `quire status` says of drafts."""

from __future__ import annotations

from typing import Any


def draft_text(executor: dict[str, Any]) -> str | None:
    """One line about an executor's drafts; None where it proposes none."""
    found, how = executor.get("speculation"), (executor["description"] or {}).get("speculation")
    if not found or not how:
        return None
    proposer = how["proposer"].replace("_", "-") + (f" {how['draft']}" if how["draft"] else "")
    line = f"drafts of {executor['target']}: {proposer}, {found['mode']}"
    proposed, accepted = int(found["proposed_count"]), int(found["accepted_count"])
    if not proposed:
        return line
    by_limit = [int(count) for count in found["steps_by_limit"]]
    mean = sum(limit * count for limit, count in enumerate(by_limit)) / max(1, sum(by_limit))
    first = [_share(a, p) for a, p in zip(found["accepted_by_position"], found["proposed_by_position"], strict=True)][
        :4
    ]
    return (
        f"{line}; {accepted} of {proposed} accepted ({_share(accepted, proposed)}; by position {', '.join(first)}), "
        f"up to {mean:.1f} a step, {found['saved_seconds']:.1f} s saved"
    )


def _share(part: int | str, whole: int | str) -> str:
    return f"{100 * int(part) / int(whole):.0f}%" if int(whole) else "-"
