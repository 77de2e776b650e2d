from pathlib import Path

import pytest

from quire.supervisor.options import ModelChoice, Ports, UpOptions, parse_model


@pytest.mark.parametrize(
    ("text", "name", "source"),
    [
        ("smollm2", "smollm2", "smollm2"),
        ("a=owner/name", "a", "owner/name"),
        ("owner/Some-Model-1.5B", "Some-Model-1.5B", "owner/Some-Model-1.5B"),
        ("/models/tiny.gguf", "tiny", "/models/tiny.gguf"),
        ("/models/tiny/", "tiny", "/models/tiny/"),
        ("a=b=c", "a", "b=c"),
    ],
)
def test_model_names(text: str, name: str, source: str) -> None:
    assert parse_model(text) == ModelChoice(name, source)


def test_local_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert parse_model("./mine") == ModelChoice("mine", str(tmp_path / "mine"))


@pytest.mark.parametrize("text", ["", "a=", "=b", "two words=b", "-x=b"])
def test_bad_models_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--model"):
        parse_model(text)


@pytest.mark.parametrize(
    ("flag", "text"),
    [("draft", ""), ("draft", "early-exit:0"), ("speculation", "17"), ("speculation", "on"), ("speculation", "-1")],
)
def test_what_says_nothing_of_drafts_is_refused(flag: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"--{flag}: "):
        UpOptions(**{flag: text})


def test_bad_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="--executors"):
        UpOptions(executors=0)
    with pytest.raises(ValueError, match="--spare-executors"):
        UpOptions(spare_executors=-1)
    with pytest.raises(ValueError, match="named 'a'"):
        UpOptions(models=(ModelChoice("a", "x"), ModelChoice("a", "y")))


@pytest.mark.parametrize(
    ("alias", "complaint"), [("auto=a,c", "no --model is named 'c'"), ("b=a", "has this name"), ("auto", "write NAME=")]
)
def test_aliases_of_what_is_not_served_are_refused(alias: str, complaint: str) -> None:
    models = (ModelChoice("a", "x"), ModelChoice("b", "y"))
    with pytest.raises(ValueError, match=complaint):
        UpOptions(models=models, aliases=(alias,))
    assert UpOptions(models=models, aliases=("auto=a@output=..9,b",)).aliases


def test_a_port_base_moves_every_port() -> None:
    base, moved = Ports(), Ports.from_base(20000)
    for name in Ports.__dataclass_fields__:
        assert getattr(moved, name) >= 20000, name
        assert getattr(moved, name) != getattr(base, name)
