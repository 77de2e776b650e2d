"""What the contestants print, in the words of the versions that are installed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.peers.parse import (
    engine_points,
    last_json,
    llama_batched_bench,
    llama_bench,
    llama_instruction_set,
    served,
)

SYSTEM_INFO = """0.01.340.917 I main: llama threadpool init, n_threads = 2
0.01.341.724 I system_info: n_threads = 2 (n_threads_batch = 2) / 2 | CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 0 | FMA = 1 |
"""


def bench_line(prompt: int, new: int, samples: list[float]) -> str:
    """A line of llama-bench, less the fields that nobody reads."""
    return json.dumps(
        {
            "build_number": 0,
            "cpu_info": "AMD EPYC",
            "model_type": "llama 256M Q4_1",
            "n_threads": 2,
            "n_prompt": prompt,
            "n_gen": new,
            "avg_ts": sum(samples) / len(samples),
            "samples_ts": samples,
        }
    )


def batched_line(batch: int, prefill: float, decode: float) -> str:
    return (
        '{"n_kv_max": 2048, "n_batch": 2048, "n_ubatch": 512, "flash_attn": -1, "is_pp_shared": 0, "n_gpu_layers": -1, '
        f'"n_threads": 2, "n_threads_batch": 2, "pp": 128, "tg": 64, "pl": {batch}, "n_kv": 192, "t_pp": 3.175659, '
        f'"speed_pp": {prefill:f}, "t_tg": 0.656881, "speed_tg": {decode:f}, "t": 3.832540, "speed": 5.218471}}'
    )


def test_llama_bench_tells_prefill_and_decode() -> None:
    text = f"warning: something\n{bench_line(512, 0, [310.5, 325.0])}\n{bench_line(0, 64, [144.0, 139.5])}\n"
    assert llama_bench(text) == {"prefill 512": 325.0, "decode 1": 144.0}


def test_llama_batched_bench_tells_the_best_of_equal_batches() -> None:
    lines = [batched_line(1, 300.0, 140.0), batched_line(1, 320.0, 130.0), batched_line(8, 900.0, 335.0)]
    assert llama_batched_bench("\n".join(["", *lines, "", ""])) == {
        "prefill 1x128": 320.0,
        "decode 1": 140.0,
        "prefill 8x128": 900.0,
        "decode 8": 335.0,
    }


@pytest.mark.parametrize("parse", [llama_bench, llama_batched_bench, last_json])
def test_output_without_results_is_an_error(parse: Any) -> None:
    with pytest.raises(ValueError, match="out of memory"):
        parse("main: error: out of memory\n")


def test_what_llama_cpp_was_built_for() -> None:
    assert llama_instruction_set(SYSTEM_INFO) == "SSE3 AVX2 FMA"
    assert llama_instruction_set("nothing of it") == ""


def test_the_last_json_counts() -> None:
    assert last_json('{"a": 1}\nloading\n{"a": 2}\ndone\n') == {"a": 2}


def test_points_of_the_engine_benchmark() -> None:
    report = {"points": [{"batch": 8, "prefill_tok_s": 900.5, "decode_tok_s": 400}]}
    assert engine_points(report, 128) == {"prefill 8x128": 900.5, "decode 8": 400.0}


def test_reports_of_the_load_generator_name_api_and_concurrency() -> None:
    spread = {"p50": 10.0, "p95": 20.0, "p99": 30.0}
    report = {"errors": 0, "requests": 8, "output_tok_s": 95.0, "ttft_ms": spread, "gap_ms": spread}
    figures = served(report, "http", 8)
    assert figures["http output tok/s @8"] == 95.0
    assert figures["http ttft p99 @8"] == figures["http gap p99 @8"] == 30.0
    with pytest.raises(ValueError, match="2 of 8 requests failed"):
        served(report | {"errors": 2, "error_kinds": {"HTTP_500": 2}}, "http", 8)
