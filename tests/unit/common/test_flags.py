"""What commands say of wrong use: one line, and what was probably meant."""

from __future__ import annotations

import argparse
import importlib

import pytest

from quire import cli
from services.common.flags import FlagParser, meant


def _number(text: str) -> int:
    return int(text)


@pytest.fixture
def parser() -> FlagParser:
    parser = FlagParser(prog="quire try")
    parser.add_argument("--model")
    parser.add_argument("--backend", choices=("cpu", "torch"))
    parser.add_argument("--count", type=_number)
    actions = parser.add_subparsers()
    actions.add_parser("list").add_argument("--json", action="store_true")
    return parser


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--modle"], "quire try: no such flag: --modle; did you mean --model?; see `quire try --help`"),
        (["--mod=a"], "quire try: no such flag: --mod; did you mean --model?; see `quire try --help`"),
        (["--zzz"], "quire try: no such flag: --zzz; see `quire try --help`"),
        (["list", "--jsn"], "quire try list: no such flag: --jsn; did you mean --json?; see `quire try list --help`"),
        (["list", "more"], "quire try list: unexpected argument: more; see `quire try list --help`"),
        (["--count", "x"], "quire try: --count: invalid value: 'x'; see `quire try --help`"),
        (["--model"], "quire try: --model: expected one argument; see `quire try --help`"),
    ],
)
def test_wrong_use_is_one_line(
    parser: FlagParser, args: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parser.parse_args(args)
    assert end.value.code == 2
    assert capsys.readouterr() == ("", said + "\n")


def test_a_choice_is_named_with_the_others(parser: FlagParser, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(["--backend", "gpu"])
    said = capsys.readouterr().err
    assert said.startswith("quire try: --backend: invalid choice: 'gpu' (choose from ")
    assert said.count("\n") == 1


def test_what_is_meant() -> None:
    assert meant("chta", ["chat", "models"]) == "; did you mean chat?"
    assert meant("fly", ["chat", "models"]) == ""
    assert meant("--kv", ["--kv-disk", "--kv-blocks", "--key"]) != ""


@pytest.mark.parametrize("role", ["gateway", "scheduler", "kvmanager", "executor"])
def test_flags_of_services(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Values are shown as they are to be written, and a wrong flag is one line here too."""
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", role, "--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert "--log-level {debug,info,warning,error}" in said
    assert not [word for word in said.split() if word.startswith("{") and word != word.lower()]
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", role, "--log-levle", "debug"])
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        f"quire serve {role}: no such flag: --log-levle; did you mean --log-level?; see `quire serve {role} --help`\n"
    )


def test_no_command_has_a_parser_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or its errors would look otherwise."""
    made: list[type[argparse.ArgumentParser]] = []
    plain = argparse.ArgumentParser.__init__

    def noted(self: argparse.ArgumentParser, *args: object, **options: object) -> None:
        made.append(type(self))
        plain(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(argparse.ArgumentParser, "__init__", noted)
    kinds = {"bench": ("engine", "serve"), "eval": ("perplexity", "agreement", "compare"), "serve": ("executor",)}
    for command in cli.COMMANDS:
        for kind in kinds.get(command, ("",)):
            with pytest.raises(SystemExit):
                importlib.import_module(f"quire.cli.{command}").run([*filter(None, [kind]), "--help"])
    assert set(made) == {FlagParser}
