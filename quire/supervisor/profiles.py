"""What `--profile` stands for: settings of several services that pull the same way, in one table."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Final

from quire.supervisor.options import UpOptions


@dataclass(frozen=True, slots=True)
class Profile:
    """Settings under the names that they have in `UpOptions`."""

    max_sequences: int  # of one step: the batch
    max_step_tokens: int  # of one step, prompts included
    gap_ms: float  # how long prompts may make the gap between two tokens of others
    gap_stretch: float  # and how many times as long as without them
    grant_ms: float  # run-ahead: what is granted can neither be cancelled at once nor make room for others
    kv: str  # formats of keys and values by age


PROFILES: Final = {
    # Small batches and chunks: every step is short, and a newcomer waits for few of them.
    "latency": Profile(max_sequences=16, max_step_tokens=256, gap_ms=50.0, gap_stretch=1.5, grant_ms=10.0, kv="hot"),
    # Large batches and chunks, so that weights are read for many tokens at a time, and few messages.
    "throughput": Profile(
        max_sequences=128, max_step_tokens=1024, gap_ms=500.0, gap_stretch=10.0, grant_ms=60.0, kv="hot"
    ),
    # Old keys and values in few bits, and no more sequences than such memory is meant to hold.
    "memory": Profile(
        max_sequences=32, max_step_tokens=256, gap_ms=150.0, gap_stretch=2.5, grant_ms=20.0, kv="hot+warm+cold"
    ),
}


def apply_profile(options: UpOptions) -> UpOptions:
    """The options with everything that the profile sets and nobody set explicitly."""
    if options.profile is None:
        return options
    settings = asdict(PROFILES[options.profile])
    return replace(options, **{name: value for name, value in settings.items() if getattr(options, name) is None})


def describe_profile(given: UpOptions) -> str:
    """One line that says what the profile set and what it left to an explicit flag."""
    if given.profile is None:
        return ""
    applied, parts = apply_profile(given), []
    for name in asdict(PROFILES[given.profile]):
        flag = f"--{name.replace('_', '-')} {_text(getattr(applied, name))}"
        parts.append(flag if getattr(given, name) is None else f"{flag} (given)")
    return f"profile {given.profile}: {', '.join(parts)}"


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
