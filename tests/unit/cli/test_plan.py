"""`quire plan`: figures against ones worked out by hand, and what it says where things do not fit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import cli
from quire.cli.capacity import fits, longest_context
from services.common.kv_policy import KvPolicy
from services.executor.kv_bytes import KvDims, most_blocks_by_age
from tests.unit.executor.test_outline import LLAMA_8B, LLAMA_70B, QWEN_7B, SMOLLM2_135M

GIB = 1 << 30


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config.json"


Capture = pytest.CaptureFixture[str]


def plan(config: Path, fields: dict[str, Any], *flags: str) -> int:
    config.write_text(json.dumps(fields))
    return cli.main(["plan", "--model", str(config), *flags])


def planned(capsys: Capture, config: Path, fields: dict[str, Any], *flags: str) -> Any:
    assert plan(config, fields, *flags, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_llama_8b_in_80_gib(capsys: Capture, config: Path) -> None:
    said = planned(capsys, config, LLAMA_8B, "--memory", "80GiB", "--context", "8192")
    left = 80 * GIB - 2 * 8_030_261_248
    assert said["weights"] == {
        "parameter_count": 8_030_261_248, "exact": True, "dtype": "bf16", "bytes": 16_060_522_496,
        "counted_from": "config.json",
    }  # fmt: skip
    assert (said["kv_bytes_per_token"], said["kv_format"], said["kv_memory_bytes"]) == (131_072, "bf16", left)
    # 256 blocks of 4 MiB are 1 GiB a sequence.
    assert (said["sequences"], said["tokens"]) == (left // GIB, left // (4 << 20) * 32) == (65, 532_800)
    by_name = {fit["name"]: fit for fit in said["formats"]}
    assert {name: fit["pools"][0]["block_bytes"] for name, fit in by_name.items()} == {
        "fp32": 8 << 20, "bf16": 4 << 20, "int8": 2_179_072, "int4": 1_212_416
    }  # fmt: skip
    assert {name: fit["bytes_per_token"] for name, fit in by_name.items()} == {
        "fp32": 262_144, "bf16": 131_072, "int8": 68_096, "int4": 37_888
    }  # fmt: skip
    assert {name: fit["sequence_count"] for name, fit in by_name.items()} == {
        "fp32": 32, "bf16": 65, "int8": left // (256 * 2_179_072), "int4": left // (256 * 1_212_416)
    }  # fmt: skip
    assert by_name["int4"]["saved"] == pytest.approx(1 - 37_888 / 131_072, abs=1e-4)


def test_policies_of_llama_8b(capsys: Capture, config: Path) -> None:
    said = planned(capsys, config, LLAMA_8B, "--memory", "80GiB", "--context", "8192", "--kv", "hot+warm+cold")
    hot, warm, cold = 4 << 20, 2_179_072, 1_212_416
    policies = {fit["name"]: fit for fit in said["policies"]}
    assert [policies[name]["sequence_bytes"] for name in ("hot", "hot+warm", "hot+warm+cold")] == [
        256 * hot, 17 * hot + 239 * warm, 17 * hot + 48 * warm + 191 * cold
    ]  # fmt: skip
    chosen = policies["hot+warm+cold"]
    most = 22 * hot + 52 * warm + 191 * cold
    assert (chosen["most_sequence_bytes"], said["sequences"]) == (most, said["kv_memory_bytes"] // most)
    assert said["kv_policy"] == chosen["policy"] == "hot:512,int8:2048,int4"
    assert [pool["format"] for pool in chosen["pools"]] == ["bf16", "int8", "int4"]
    assert all(
        pool["block_count"] // needed >= said["sequences"]
        for pool, needed in zip(chosen["pools"], (22, 52, 191), strict=True)
    )
    assert sum(pool["block_count"] * pool["block_bytes"] for pool in chosen["pools"]) <= said["kv_memory_bytes"]


def test_qwen_and_smollm2(capsys: Capture, config: Path) -> None:
    said = planned(capsys, config, QWEN_7B, "--memory", "24GiB", "--context", "8192")
    assert said["kv_bytes_per_token"] == 57_344
    assert said["sequences"] == (24 * GIB - 2 * 7_615_616_512) // (8192 * 57_344)
    said = planned(capsys, config, SMOLLM2_135M, "--memory", "2GiB", "--dtype", "fp32")
    assert (said["kv_format"], said["kv_bytes_per_token"], said["context"]) == ("fp32", 46_080, 8192)
    assert said["sequences"] == (2 * GIB - 4 * 134_515_008) // (8192 * 46_080)


def test_weights_that_do_not_fit(capsys: Capture, config: Path) -> None:
    assert plan(config, LLAMA_70B, "--memory", "80GiB", "--context", "8192", "--json") == 1
    out, err = capsys.readouterr()
    said = json.loads(out)
    assert (said["fits"], said["sequences"], said["weights"]["bytes"]) == (False, 0, 141_107_412_992)
    assert err == (
        "quire plan: --memory 80 GiB: the weights take 131.4 GiB, a sequence of 8,192 tokens 2.5 GiB: "
        "at least 133.9 GiB are needed; with --dtype q8_0 or q4_1 or q4_0 it would fit\n"
    )
    assert plan(config, LLAMA_70B, "--memory", "80GiB", "--context", "8192", "--dtype", "q4_0") == 0


def test_a_context_that_does_not_fit(capsys: Capture, config: Path) -> None:
    assert plan(config, LLAMA_8B, "--memory", "15.5GiB", "--context", "8192") == 1
    left = int(15.5 * GIB) - 16_060_522_496
    longest = left // (4 << 20) * 32
    err = capsys.readouterr().err
    assert err.startswith(
        f"quire plan: --memory 15.5 GiB: no sequence of 8,192 tokens fits, but one of {longest:,} does"
    )


def test_a_context_beyond_the_models_is_noted(capsys: Capture, config: Path) -> None:
    assert plan(config, SMOLLM2_135M, "--memory", "4GiB", "--context", "16384") == 0
    assert "note: --context 16,384 is beyond the model's own 8,192 tokens" in capsys.readouterr().out


def test_padded_heads_are_noted(capsys: Capture, config: Path) -> None:
    said = planned(capsys, config, LLAMA_8B | {"head_dim": 80}, "--memory", "80GiB", "--context", "8192")
    assert said["kv_bytes_per_token"] == 2 * 32 * 8 * 80 * 2
    assert said["policies"][0]["bytes_per_token"] == 2 * 32 * 8 * 96 * 2
    assert said["notes"] == ["heads of 80 are stored as 96: blocks count them so, kv_bytes_per_token does not"]


def test_the_text_says_what_the_json_does(capsys: Capture, config: Path) -> None:
    assert plan(config, LLAMA_8B, "--memory", "80GiB", "--context", "8192") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "model    LlamaForCausalLM, 32 layers, 8 KV heads of 128 for 32 query heads, context 131,072",
        "weights  8,030,261,248 in bf16: 14.96 GiB (from config.json)",
        "memory   80 GiB, of which 65.04 GiB are left for KV",
        "KV       131,072 bytes per token in bf16, blocks of 32 tokens",
        "fits     65 sequences of 8,192 tokens with --kv hot",
    ]
    assert [line.split()[0] for line in lines[6:]] == [
        "KV", "fp32", "bf16", "int8", "int4", "hot", "hot+warm", "hot+warm+cold"
    ]  # fmt: skip
    assert lines[9].split() == ["int8", "2.078", "MiB", "68,096", "532", "MiB", "125", "1,025,568", "48%"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--memory", "0"), "--memory: 0 is not above 0"),
        (("--memory", "-1GiB"), "--memory"),
        (("--memory", "much"), "--memory: 'much' is no size such as 80GiB"),
        (("--memory", "1GiB", "--context", "0"), "--context: '0' is no number of tokens above 0"),
        (("--memory", "1GiB", "--kv", "cold"), "--kv"),
        ((), "--memory"),
    ],
)
def test_bad_flags_are_wrong_use(flags: tuple[str, ...], said: str, capsys: Capture, config: Path) -> None:
    with pytest.raises(SystemExit) as end:
        plan(config, LLAMA_8B, *flags)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hidden_size": 64}, "config.json: num_attention_heads is missing"),
        (
            {name: value for name, value in LLAMA_8B.items() if name != "max_position_embeddings"},
            "--context: the model states none",
        ),
        (LLAMA_8B | {"quantization_config": {"quant_method": "odd"}}, "--dtype: the config states no known format"),
    ],
)
def test_bad_models_are_one_line(fields: dict[str, Any], said: str, capsys: Capture, config: Path) -> None:
    with pytest.raises(SystemExit) as end:
        plan(config, fields, "--memory", "80GiB")
    assert end.value.code == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"quire plan: {said}")
    assert err.count("\n") == 1


def test_nothing_heavy_is_imported(config: Path) -> None:
    config.write_text(json.dumps(LLAMA_70B))
    code = (
        "import sys, quire.cli\n"
        f"assert quire.cli.main(['plan', '--model', {str(config)!r}, '--memory', '320GiB']) == 0\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'gguf', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@given(st.integers(0, 1 << 26), st.sampled_from(["hot", "hot+warm", "hot+warm+cold"]))
def test_the_longest_context_is_the_longest(memory: int, kv: str) -> None:
    policy = KvPolicy.named(kv)
    sizes = (8192, 4288, 2432)[: len(policy.colder) + 1]

    def cost(length: int) -> int:
        return sum(size * count for size, count in zip(sizes, most_blocks_by_age(policy, 32, length), strict=True))

    longest = longest_context(memory, sizes, policy)
    assert longest == 0 or cost(longest) <= memory
    assert cost(longest + 1) > memory


def test_every_fit_of_no_memory_is_empty() -> None:
    for fit in [*fits(KvDims(2, 2, 64, 64), "bf16", 0, 4096)[0], *fits(KvDims(2, 2, 64, 64), "bf16", 0, 4096)[1]]:
        assert (fit.sequence_count, fit.token_count, fit.longest_context) == (0, 0, 0)
        assert all(pool.block_count == 0 for pool in fit.pools)
