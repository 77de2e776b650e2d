"""Traces over the real pool, beside caches written apart."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from services.kvmanager.eviction import LeafLru
from services.kvmanager.replay import (
    BESIDE_DISTINCT,
    Tally,
    TraceRequest,
    distinct_blocks,
    read_trace,
    replay_ideal,
    replay_plain_lru,
    replay_pool,
)


def conversations(seed: int, count: int = 120) -> list[TraceRequest]:
    """Turns of several conversations behind one system prompt, each turn the one before and something more."""
    dice = random.Random(seed)
    texts: list[tuple[int, ...]] = [()] * 12
    fresh, requests = 1, []
    for at in range(count):
        chosen = min(dice.randrange(12), dice.randrange(12))
        added = dice.randint(1, 3)
        before = texts[chosen][:-1] if texts[chosen] else (0,)
        ids = (*before, *range(fresh, fresh + added))
        fresh += added
        texts[chosen] = ids
        requests.append(TraceRequest(float(at), 512 * (len(ids) - 1) + dice.randint(1, 512), ids))
    return requests


def test_a_trace_is_read_with_its_units(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"timestamp": 1500, "input_length": 513, "output_length": 9, "hash_ids": [4, 5]}\n'
        '{"timestamp": 2000, "input_length": 512, "output_length": 9, "hash_ids": [4]}\n'
    )
    assert read_trace(path) == [TraceRequest(1.5, 513, (4, 5)), TraceRequest(2.0, 512, (4,))]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[1]",
        '{"timestamp": 0, "input_length": 5}',
        '{"timestamp": 0, "input_length": 0, "hash_ids": []}',
        '{"timestamp": 0, "input_length": 513, "hash_ids": [1]}',
        '{"timestamp": 0, "input_length": 5, "hash_ids": ["x"]}',
        '{"timestamp": 0, "input_length": 5, "hash_ids": [-1]}',
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "t.jsonl"
    good = json.dumps({"timestamp": 0, "input_length": 5, "hash_ids": [1]})
    path.write_text(f"{good}\n{line}\n")
    with pytest.raises(ValueError, match=r"t\.jsonl, line 2"):
        read_trace(path)


def test_a_trace_without_requests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    with pytest.raises(ValueError, match="no requests"):
        read_trace(tmp_path / "empty")


def test_one_token_is_always_computed_and_part_blocks_have_no_key() -> None:
    once, longer = TraceRequest(0.0, 512, (7,)), TraceRequest(1.0, 600, (7, 8))
    assert (len(once.keys(256)), once.findable(256)) == (2, 1)
    assert (len(longer.keys(256)), longer.findable(256)) == (2, 2)
    assert once.keys(256) == longer.keys(256)
    assert distinct_blocks([once, longer], 256) == 2
    expected = Tally(query_tokens=1112, hit_tokens=512)
    assert replay_ideal([once, longer], 256) == expected
    assert replay_pool([once, longer], 256, 4, LeafLru) == expected
    assert replay_plain_lru([once, longer], 256, 4) == expected


@pytest.mark.parametrize("seed", range(3))
def test_with_enough_blocks_all_is_found_that_can_be(seed: int) -> None:
    requests = conversations(seed)
    enough = distinct_blocks(requests, 128) + BESIDE_DISTINCT
    found = replay_pool(requests, 128, enough, LeafLru)
    assert found == replay_ideal(requests, 128)
    assert found.hit_tokens > 0.5 * found.query_tokens


@pytest.mark.parametrize("seed", range(3))
def test_at_a_tenth_it_finds_no_less_than_plain_lru(seed: int) -> None:
    requests = conversations(seed, count=400)
    tenth = distinct_blocks(requests, 128) // 10
    found, plain = replay_pool(requests, 128, tenth, LeafLru), replay_plain_lru(requests, 128, tenth)
    assert found.query_tokens == plain.query_tokens
    assert found.refused_count == plain.refused_count
    assert found.hit_tokens >= plain.hit_tokens > 0
    assert found.evicted_count > 0


def test_prompts_that_no_cache_of_that_size_holds_count_as_not_found() -> None:
    requests = [TraceRequest(0.0, 1024, (1, 2)), TraceRequest(1.0, 513, (1, 9)), TraceRequest(2.0, 513, (1, 9))]
    assert replay_pool(requests, 512, 1, LeafLru) == Tally(2050, 0, refused_count=3)
    assert replay_pool(requests[1:], 512, 2, LeafLru) == Tally(1026, 512)
    assert replay_plain_lru(requests, 512, 1) == Tally(2050, 0, refused_count=3)
