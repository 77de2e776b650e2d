"""Requests from flags and from traces."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from quire.bench.workload import TraceScale, fixed_requests, poisson_requests, prompt_text, trace_requests

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9305900,396,109
2023-11-16 18:16:46.6805900,10,1
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 600, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 3500, "input_length": 700, "output_length": 5, "hash_ids": [0, 2]}
"""


def test_poisson_arrivals_repeat_by_seed_and_have_the_rate() -> None:
    requests = poisson_requests(2000, 4.0, 128, 64, seed=3)
    assert requests == poisson_requests(2000, 4.0, 128, 64, seed=3)
    assert requests != poisson_requests(2000, 4.0, 128, 64, seed=4)
    assert requests[0].arrival == 0.0
    assert requests[-1].arrival == pytest.approx(500, rel=0.1)
    assert all(a.arrival <= b.arrival for a, b in itertools.pairwise(requests))


def test_an_azure_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    requests = trace_requests(path, 2, TraceScale())
    assert [(r.prompt_tokens, r.output_tokens) for r in requests] == [(374, 44), (396, 109)]
    assert [r.arrival for r in requests] == pytest.approx([0.0, 4.25])
    assert len(trace_requests(path, None, TraceScale())) == 3


def test_a_mooncake_trace_scaled_down(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    requests = trace_requests(path, None, TraceScale(5.0, 0.1, max_prompt_tokens=65, max_output_tokens=20))
    assert [(r.arrival, r.prompt_tokens, r.output_tokens) for r in requests] == [(0.0, 60, 20), (0.5, 65, 1)]


def test_equal_blocks_are_equal_text(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    first, second = (prompt_text(request, 0).split() for request in trace_requests(path, None, TraceScale()))
    assert (len(first), len(second)) == (600, 700)
    assert first[:512] == second[:512]
    assert first[512:600] != second[512:600]


def test_prompts_have_their_length_and_share_no_beginning() -> None:
    prompts = [prompt_text(request, 0).split() for request in fixed_requests(20, 128, 1)]
    assert {len(words) for words in prompts} == {128}
    assert len({tuple(words[:8]) for words in prompts}) == 20
    assert prompt_text(fixed_requests(1, 128, 1)[0], 1).split() != prompts[0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "a,b\n1,2\n", "columns"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "empty"),
        ("a.jsonl", "{}\n", "line 1"),
        ("a.jsonl", "nonsense\n", "line 1"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        trace_requests(tmp_path / name, None, TraceScale())
