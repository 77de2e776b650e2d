"""Profiles set several settings together; what was given explicitly wins."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from quire.cli import up
from quire.supervisor.layout import lay_out
from quire.supervisor.options import UpOptions
from quire.supervisor.profiles import PROFILES, apply_profile, describe_profile
from services.executor.settings import ExecutorSettings
from services.scheduler.settings import SchedulerSettings


def test_without_a_profile_services_keep_their_defaults() -> None:
    options = UpOptions()
    assert apply_profile(options) == options
    assert describe_profile(options) == ""
    assert not any("--gap-ms" in spec.command or "--max-sequences" in spec.command for spec in lay_out(options, 1))


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_reaches_the_services_that_it_is_for(name: str) -> None:
    specs = {spec.name: spec.command for spec in lay_out(apply_profile(UpOptions(profile=name, spare_executors=0)), 1)}
    profile = PROFILES[name]
    executor, scheduler = specs["executor"], specs["scheduler"]
    assert executor[executor.index("--max-sequences") + 1] == str(profile.max_sequences)
    assert executor[executor.index("--max-step-tokens") + 1] == str(profile.max_step_tokens)
    assert executor[executor.index("--kv") + 1] == profile.kv
    assert scheduler[scheduler.index("--gap-ms") + 1] == str(profile.gap_ms)
    assert scheduler[scheduler.index("--gap-stretch") + 1] == str(profile.gap_stretch)
    assert scheduler[scheduler.index("--grant-ms") + 1] == str(profile.grant_ms)


@pytest.mark.parametrize("name", PROFILES)
def test_services_take_what_a_profile_sets(name: str) -> None:
    settings = asdict(PROFILES[name])
    ExecutorSettings(**{key: settings[key] for key in ("max_sequences", "max_step_tokens", "kv")})
    SchedulerSettings(**{key: settings[key] for key in ("gap_ms", "gap_stretch", "grant_ms")})


def test_explicit_flags_win_and_the_line_says_so() -> None:
    given = UpOptions(profile="latency", max_sequences=4, kv="hot+warm")
    applied = apply_profile(given)
    assert (applied.max_sequences, applied.kv) == (4, "hot+warm")
    assert applied.max_step_tokens == PROFILES["latency"].max_step_tokens
    assert describe_profile(given) == (
        "profile latency: --max-sequences 4 (given), --max-step-tokens 256, --gap-ms 50, --gap-stretch 1.5, "
        "--grant-ms 10, --kv hot+warm (given)"
    )


def test_quire_up_prints_what_the_profile_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen: list[UpOptions] = []

    def run(options: UpOptions, *_: object, **__: object) -> int:
        chosen.append(options)
        return 0

    monkeypatch.setattr(up, "run_foreground", run)
    assert up.run(["--profile", "throughput", "--grant-ms", "5"]) == 0
    assert chosen[0].max_sequences == PROFILES["throughput"].max_sequences
    assert chosen[0].grant_ms == 5.0
    assert "profile throughput: --max-sequences 128" in capsys.readouterr().err
