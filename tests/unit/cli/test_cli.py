import subprocess
import sys

import pytest

from quire import __version__, cli
from quire.cli.plain import plain
from quire.cli.up import _options, _parser, _without_detach
from quire.supervisor.options import ModelChoice
from quire.v1 import types_pb2


@pytest.mark.parametrize("command", [c for c in cli.COMMANDS if c != "bench"])
def test_every_command_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = cli.main([command, "--help"])
    except SystemExit as end:
        status = int(end.code or 0)
    assert status == 0
    assert "examples:" in capsys.readouterr().out


def test_wrong_use_is_status_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fly"]) == 2
    assert capsys.readouterr().err == "quire: no such command: fly; `quire --help` lists them\n"
    assert cli.main(["chta"]) == 2
    assert capsys.readouterr().err == "quire: no such command: chta; did you mean chat?; `quire --help` lists them\n"
    assert cli.main([]) == 2
    assert cli.main(["serve", "cook"]) == 2
    assert cli.main(["bench", "cook"]) == 2
    assert cli.main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:9", "no gateway answers on 127.0.0.1:9; is `quire up` running?"),
        ("no-such-host.invalid:1", "no-such-host.invalid:1: no such host"),
    ],
)
def test_no_gateway_is_a_clear_line(address: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["generate", "hello", "--address", address])
    assert end.value.code == 1
    assert capsys.readouterr() == ("", f"quire generate: {said}\n")


def test_light_commands_import_nothing_heavy() -> None:
    code = (
        "import sys, quire.cli; quire.cli.main(['--help']);"
        "assert not {'grpc', 'torch', 'asyncio'} & set(sys.modules), sys.modules.keys();"
        "import quire.cli.up, quire.cli.chat, quire.cli.status, quire.cli.models, quire.cli.generate;"
        "assert not {'torch', 'transformers', 'fastapi', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_flags_of_up() -> None:
    given = _parser().parse_args(
        ["--model", "a=owner/x", "--executors", "2", "--port-base", "7000", "--http-port", "81"]
    )
    options = _options(given)
    assert options.models == (ModelChoice("a", "owner/x"),)
    assert (options.executors, options.ports.grpc, options.ports.http) == (2, 7000, 81)
    assert _without_detach(["--model", "a", "--detach", "--json"]) == ["--model", "a"]


def test_messages_become_plain_data() -> None:
    data = plain(types_pb2.ModelDescription(name="123", parameter_count=1 << 40, eos_token_ids=[2]))
    assert data["name"] == "123"
    assert data["parameter_count"] == 1 << 40
    assert data["eos_token_ids"] == [2]
    assert data["bos_token_id"] is None
    pool = plain(types_pb2.BlockPool(tier=types_pb2.TIER_DEVICE))
    assert pool["tier"] == "TIER_DEVICE"


def test_json_of_up_needs_detach(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["up", "--json"])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("quire up: --json needs --detach")
