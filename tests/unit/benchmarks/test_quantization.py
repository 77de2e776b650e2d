"""What the benchmark of quantization concludes from a comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.quantization import claims, markdown, recipes, split_text


def report(**nll: float) -> dict[str, Any]:
    names = {name.replace("_", "-"): value for name, value in nll.items()}
    ranked = sorted(names, key=lambda name: names[name])
    pairs = [
        {
            "better": better,
            "worse": worse,
            "nats_per_token": names[worse] - names[better],
            "interval": [names[worse] - names[better] - 0.03, names[worse] - names[better] + 0.03],
            "is_certain": names[worse] - names[better] > 0.03,
        }
        for at, better in enumerate(ranked)
        for worse in ranked[at + 1 :]
    ]
    row = {"bits_per_weight": 4.5, "bytes": 5_000_000, "perplexity": 20.0, "perplexity_interval": [19.0, 21.0]}
    row |= {"kl_mean": None, "top1_agreement": None, "prefill_tok_s": 100.0, "decode_tok_s": 10.0}
    return {"models": [row | {"model": name, "nll": value} for name, value in names.items()], "differences": pairs}


def test_methods_are_held_against_rounding_on_the_same_grid() -> None:
    found = list(claims(report(reference=3.0, rtn_4_sym=3.4, gptq_4_sym=3.1, awq_4_sym=3.38, rtn_3_sym=4.0)))
    assert found == [
        "gptq-4-sym beats rtn-4-sym by 0.3000 nats per token (0.2700 to 0.3300); 25% of the loss remain",
        "awq-4-sym beats rtn-4-sym by 0.0200 nats per token (-0.0100 to 0.0500), which may be chance; "
        "95% of the loss remain",
    ]


def test_a_method_that_is_worse_says_so() -> None:
    assert list(claims(report(reference=3.0, rtn_4_sym=3.1, gptq_4_sym=3.2))) == [
        "gptq-4-sym is no better than rtn-4-sym"
    ]


def test_the_table_has_a_row_per_model() -> None:
    lines = markdown(
        report(reference=3.0, fp8=3.1), {"fp8": {"seconds": 61.4, "peak_bytes": 1_234_000_000}}
    ).splitlines()
    assert lines[2].startswith("| reference | 4.50 | 5.0 | 20.000 (19.00 to 21.00) |")
    assert lines[3].endswith("| 61 s | 1.23 GB |")
    assert len({line.count("|") for line in lines}) == 1


def test_no_text_is_both_scored_and_calibrated_on(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i}\n" for i in range(100)))
    scored, calibration = split_text(text, tmp_path)
    assert scored.read_text() + calibration.read_text() == text.read_text()
    assert len(calibration.read_text().splitlines()) == 25


def test_recipes_have_names_of_their_own() -> None:
    names = [recipe.name for recipe in recipes()]
    assert len(set(names)) == len(names)
