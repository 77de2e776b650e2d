"""`quire eval compare` against the other evaluations, and the command as a user runs it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from quire import cli
from services.executor.eval import compare
from tests.fixtures.models import make_rand_model
from tests.fixtures.vocabularies import byte_level
from tests.unit.executor.eval.conftest import COMMON, Evaluate
from tests.unit.executor.eval.test_agreement import nudged_copy

TEXT = "The quick brown fox jumps over the lazy dog, twice. " * 3
FIELDS = ["model", "backend", "dtype", "kv_format", "device", "bytes", "parameters", "bits_per_weight"]
FIELDS += ["prefill_tok_s", "decode_tok_s", "nll", "perplexity", "perplexity_interval"]
FIELDS += ["kl_mean", "kl_p99", "top1_agreement"]
Refusal = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def _soon_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds are not what these tests are about."""
    for name, value in {"PROMPT_TOKENS": 8, "OUTPUT_TOKENS": 4, "SPEED_RUNS": 2}.items():
        monkeypatch.setattr(compare, name, value)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """A model, and one that is a little off."""
    path = make_rand_model(tmp_path / "plain")
    return path, nudged_copy(path, tmp_path / "nudged")


def test_equals_the_other_evaluations(models: tuple[Path, Path], text: Path, evaluate: Evaluate) -> None:
    plain, nudged = models
    shared = ["--dtype", "fp32", "--text", text, "--context", "48"]
    report = evaluate("compare", plain, nudged, *shared)
    assert list(report) == ["text", "context", "stride", "scored", "windows", "models", "differences"]
    assert (report["text"], report["context"], report["stride"]) == ("text.txt", 48, 24)
    assert [list(row) for row in report["models"]] == [FIELDS, FIELDS]
    assert [row["model"] for row in report["models"]] == ["plain", "nudged"]
    for row, path in zip(report["models"], models, strict=True):
        alone = evaluate("perplexity", "--model", path, *shared)
        assert report["scored"] == alone["scored"] == len(TEXT)
        assert (row["nll"], row["perplexity"]) == pytest.approx((alone["nll"], alone["perplexity"]))
        low, high = row["perplexity_interval"]
        assert low < row["perplexity"] < high
        assert min(row["prefill_tok_s"], row["decode_tok_s"]) > 0
    first, second = report["models"]
    assert [first[name] for name in FIELDS[-3:]] == [None, None, None]
    apart = evaluate("agreement", "--model", nudged, "--against-model", plain, *shared)
    assert [second[name] for name in FIELDS[-3:]] == pytest.approx([apart[name] for name in FIELDS[-3:]])


def test_size_is_that_of_the_weights_on_disk(models: tuple[Path, Path], text: Path, evaluate: Evaluate) -> None:
    (row,) = evaluate("compare", models[0], "--text", text, "--tokens", "30")["models"]
    stored = (models[0] / "model.safetensors").stat().st_size
    assert row["bytes"] == stored
    assert row["bits_per_weight"] == pytest.approx(8 * stored / row["parameters"])
    assert 32 < row["bits_per_weight"] < 34  # fp32, and a header


def test_differences_are_of_pairs(tmp_path: Path, models: tuple[Path, Path], text: Path, evaluate: Evaluate) -> None:
    other = make_rand_model(tmp_path / "other", seed=7)
    report = evaluate("compare", *models, other, "--dtype", "fp32", "--text", text, "--context", "32", "--stride", "32")
    nll = {row["model"]: row["nll"] for row in report["models"]}
    assert report["windows"] == 6  # 156 tokens, 31 beside the beginning token in each
    ranked = sorted(nll, key=lambda name: nll[name])
    pairs = [(ranked[0], ranked[1]), (ranked[0], ranked[2]), (ranked[1], ranked[2])]
    assert [(pair["better"], pair["worse"]) for pair in report["differences"]] == pairs
    for pair in report["differences"]:
        assert pair["nats_per_token"] == pytest.approx(nll[pair["worse"]] - nll[pair["better"]])
        low, high = pair["interval"]
        assert low <= pair["nats_per_token"] <= high
        assert pair["is_certain"] == (low > 0)


def test_several_at_once_say_the_same(
    tmp_path: Path, models: tuple[Path, Path], text: Path, evaluate: Evaluate
) -> None:
    others = [make_rand_model(tmp_path / f"other-{seed}", seed=seed) for seed in (7, 8)]
    shared = [*models, *others, "--dtype", "fp32", "--text", text, "--context", "32"]
    one, two = evaluate("compare", *shared), evaluate("compare", *shared, "--at-once", "2")
    assert one["differences"] == two["differences"]
    for name in ("model", "nll", "kl_mean", "top1_agreement"):
        assert [row[name] for row in one["models"]] == [row[name] for row in two["models"]]


def test_a_reference_of_its_own_comes_first(models: tuple[Path, Path], text: Path, evaluate: Evaluate) -> None:
    plain, nudged = models
    shared = ["--dtype", "fp32", "--text", text, "--tokens", "60"]
    report = evaluate("compare", nudged, "--reference", plain, *shared)
    assert [row["model"] for row in report["models"]] == ["plain", "nudged"]
    assert report["models"][1]["kl_mean"] > 0


def test_the_reference_writes_a_text_where_none_is_given(models: tuple[Path, Path], evaluate: Evaluate) -> None:
    """On its own samples no model is better than the one that wrote them."""
    report = evaluate("compare", *models, "--dtype", "fp32", "--context", "40", "--tokens", "390")
    assert (report["text"], report["scored"]) == (None, 390)
    (pair,) = report["differences"]
    assert (pair["better"], pair["worse"], pair["is_certain"]) == ("plain", "nudged", True)


def test_models_of_equal_names_are_called_by_their_sources(tmp_path: Path, text: Path, evaluate: Evaluate) -> None:
    paths = [make_rand_model(tmp_path / folder / "model", seed) for seed, folder in enumerate("ab")]
    report = evaluate("compare", *paths, "--text", text, "--tokens", "20")
    assert [row["model"] for row in report["models"]] == [str(path) for path in paths]


def test_a_short_context_is_measured_within_it(tmp_path: Path, text: Path, evaluate: Evaluate) -> None:
    path = make_rand_model(tmp_path / "short", context_length=9)
    (row,) = evaluate("compare", path, "--text", text)["models"]
    assert min(row["prefill_tok_s"], row["decode_tok_s"]) > 0


def test_what_is_printed(models: tuple[Path, Path], text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["eval", "compare", *COMMON, *map(str, models), "--dtype", "fp32", "--text", str(text), "--context", "48"]
    assert cli.main([*flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert cli.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("torch fp32, KV fp32")
    assert lines[1].startswith(f"156 tokens in {report['windows']} windows of 48 that begin 24 apart")
    assert lines[3].split()[:3] == ["model", "size", "bits/weight"]
    for line, row in zip(lines[4:6], report["models"], strict=True):
        cells = line.split()
        assert cells[0] == row["model"]
        assert f"{row['perplexity']:.3f}" in cells
    assert f"{report['models'][1]['kl_mean']:.2e}" in lines[5].split()
    (pair,) = report["differences"]
    assert lines[-1].startswith(f"  {pair['better']} before {pair['worse']}: {pair['nats_per_token']:+.4f} (")


def test_a_plot_is_drawn(models: tuple[Path, Path], text: Path, tmp_path: Path, evaluate: Evaluate) -> None:
    picture = tmp_path / "compared.png"
    evaluate("compare", *models, "--text", text, "--tokens", "60", "--context", "32", "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_one_window_has_no_interval(models: tuple[Path, Path], text: Path, evaluate: Evaluate) -> None:
    report = evaluate("compare", *models, "--text", text, "--plot", text.with_name("one.pdf"))
    assert report["windows"] == 1
    assert [row["perplexity_interval"] for row in report["models"]] == [None, None]
    (pair,) = report["differences"]
    assert (pair["interval"], pair["is_certain"]) == (None, False)
    assert math.isfinite(pair["nats_per_token"])


def test_models_of_unlike_vocabularies_are_refused(
    tmp_path: Path, models: tuple[Path, Path], text: Path, refusal: Refusal
) -> None:
    larger = make_rand_model(tmp_path / "larger", vocabulary=byte_level(["the"]))
    said = f"quire eval compare: MODEL: {larger} has a vocabulary of 261 tokens, the reference one of 260"
    assert refusal("compare", models[0], larger, "--text", text) == (2, said)
    assert refusal("compare", models[0], larger, "--tokens", "10") == (2, said)


def test_models_that_read_the_text_otherwise_are_refused(
    tmp_path: Path, models: tuple[Path, Path], text: Path, refusal: Refusal
) -> None:
    other = make_rand_model(tmp_path / "other", vocabulary=byte_level(add_bos=False))
    said = f"quire eval compare: MODEL: {other} reads this text otherwise than the reference"
    assert refusal("compare", models[0], other, "--text", text) == (2, said)


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        ([], 2, "the following arguments are required: MODEL"),
        (["absent"], 1, "MODEL: no model 'absent'"),
        (["./plain", "./plain"], 2, "MODEL: one is named twice"),
        (["./plain", "--reference", "absent"], 1, "--reference: no model 'absent'"),
        (["./plain", "--text", "absent.txt"], 2, "--text: absent.txt: No such file or directory"),
        (["./plain", "--context", "2000"], 2, "--context: 2000 is beyond the 1024 tokens"),
        (["./plain", "--tokens", "0"], 2, "--tokens: 0 is less than 1"),
        (["./plain", "--tokens", "9", "--plot", "what.ever"], 2, "--plot: what.ever: the name must end with one of "),
        (["./plain", "--plot", "absent/it.png"], 2, "--plot: absent/it.png: no such folder"),
    ],
)
def test_bad_flags_are_named(
    models: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    refusal: Refusal,
    flags: list[str],
    status: int,
    said: str,
) -> None:
    monkeypatch.chdir(models[0].parent)
    found, line = refusal("compare", *flags)
    assert found == status
    assert f"quire eval compare: {said}" in line
