"""Progress, sealing and reuse of prefixes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.kvmanager.blocks import BlockState
from services.kvmanager.holdings import Refused
from services.kvmanager.matching import common_length
from tests.unit.kvmanager.helpers import (
    compute,
    eviction_order,
    executor,
    free_order,
    ids,
    manager,
    only_executor,
    reservation,
)


def test_only_computed_full_blocks_are_found() -> None:
    made, session = manager()
    made.reserve(session, reservation(1, range(10)))
    _, sealed = made.progress(session, 1, 7, [])
    assert [(block.group_id, block.block_id) for block in sealed] == [(0, 0)]
    answer = made.reserve(session, reservation(2, [*range(7), 9, 9, 9]))
    assert (answer.cached_tokens, ids(answer)) == (4, [0, 3, 4])
    assert made.verify() == []


def test_states_follow_the_computed_length() -> None:
    made, session = manager()
    made.reserve(session, reservation(1, range(10)))
    state = only_executor(made).pools[0].blocks.state

    def states() -> list[BlockState]:
        return [state(block) for block in range(3)]

    assert states() == [BlockState.RESERVED] * 3
    for computed, expected in [
        (1, [BlockState.PENDING, BlockState.RESERVED, BlockState.RESERVED]),
        (4, [BlockState.READY, BlockState.RESERVED, BlockState.RESERVED]),
        (5, [BlockState.READY, BlockState.PENDING, BlockState.RESERVED]),
        (10, [BlockState.READY, BlockState.READY, BlockState.PENDING]),
    ]:
        made.progress(session, 1, computed, [])
        assert states() == expected
        assert made.verify() == []


@pytest.mark.parametrize(("tokens", "cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (14, 12)])
def test_at_least_one_token_is_left_to_compute(tokens: int, cached: int) -> None:
    made, session = manager()
    made.reserve(session, reservation(1, range(12)))
    compute(made, session, 1)
    answer = made.reserve(session, reservation(2, range(tokens)))
    assert answer.cached_tokens == cached
    assert ids(answer)[: cached // 4] == [0, 1, 2][: cached // 4]
    assert made.prefix_query_tokens == 12 + tokens
    assert made.prefix_hit_tokens == cached


def test_output_tokens_are_sealed_too() -> None:
    made, session = manager()
    made.reserve(session, reservation(1, range(6), lookahead=8))
    assert len(made.progress(session, 1, 6, [100])[1]) == 1
    assert made.progress(session, 1, 7, [101])[1] == []
    assert [block.block_id for block in made.progress(session, 1, 8, [102])[1]] == [1]
    assert [block.block_id for block in made.progress(session, 1, 13, [103, 104, 105, 106, 107])[1]] == [2]
    made.release(session, 1)
    turn = [*range(6), 100, 101, 102, 103, 104, 105, 106, 107]
    assert made.reserve(session, reservation(2, turn)).cached_tokens == 12
    assert made.verify() == []


def test_skip_prefix_cache_computes_everything_and_is_not_counted() -> None:
    made, session = manager()
    made.reserve(session, reservation(1, range(8)))
    compute(made, session, 1)
    answer = made.reserve(session, reservation(2, range(8), skip_prefix_cache=True))
    assert (answer.cached_tokens, ids(answer)) == (0, [2, 3])
    assert made.prefix_query_tokens == 8
    assert [use.query_tokens for _, use, _ in made.executors["e"].pools[0].uses()] == [8]


def test_the_first_block_with_a_key_wins() -> None:
    """Two requests with one prompt at the same time: the second one's blocks stay without keys and are freed."""
    made, session = manager()
    made.reserve(session, reservation(1, range(8)))
    made.reserve(session, reservation(2, range(8), skip_prefix_cache=True))
    assert len(compute(made, session, 2)) == 2
    assert compute(made, session, 1) == []
    assert made.verify() == []
    made.release(session, 2)
    assert eviction_order(made) == [3, 2]
    made.release(session, 1)
    assert free_order(made)[:2] == [0, 1]
    assert made.reserve(session, reservation(3, range(9))).cached_tokens == 8


def test_a_twins_release_keeps_prefixes_younger_than_their_continuations() -> None:
    """Leaf first: a block whose content another one had first counts as used when its holder leaves."""
    made, session = manager()
    made.reserve(session, reservation(1, range(4)))
    made.reserve(session, reservation(2, range(8)))
    compute(made, session, 1)
    assert [block.block_id for block in compute(made, session, 2)] == [2]
    made.release(session, 1)
    made.release(session, 2)
    assert eviction_order(made) == [2, 0]  # 0 is the prefix, 2 its continuation; 1 had the content of 0


def test_f2_another_fingerprint_or_tenant_never_hits() -> None:
    """F2: the same tokens under other weights, or of another tenant, are a miss; also after a reload."""
    made, session = manager(executor("a"), executor("b", model="b" * 64))
    made.reserve(session, reservation(1, range(8), on=["a"]))
    compute(made, session, 1)
    assert made.reserve(session, reservation(2, range(9), on=["b"], model="b" * 64)).cached_tokens == 0
    assert made.reserve(session, reservation(3, range(9), on=["a"], namespace="other")).cached_tokens == 0
    assert made.reserve(session, reservation(4, range(9), on=["a"])).cached_tokens == 8
    reloaded = made.replace(executor("a", model="c" * 64), epoch=1)
    reloaded.settle([])
    assert reloaded.available_count == 8
    assert made.reserve(session, reservation(5, range(9), on=["a"], model="c" * 64)).cached_tokens == 0


def test_f6_a_block_is_reused_only_when_nobody_holds_it() -> None:
    """F6: under pressure shared blocks stay with their readers, whoever came first."""
    made, session = manager()
    made.reserve(session, reservation(1, range(8)))
    compute(made, session, 1)
    made.reserve(session, reservation(2, range(9)))  # reads blocks 0 and 1
    made.release(session, 1)
    taken = ids(made.reserve(session, reservation(3, range(50, 70))))
    assert taken == [3, 4, 5, 6, 7]
    assert made.reserve(session, reservation(4, [1])).reasons == ["e node -1: needs 1 new blocks, 0 available"]
    assert made.reserve(session, reservation(4, range(9))).cached_tokens == 0  # none: no room for the ninth token
    made.release(session, 2)
    assert ids(made.reserve(session, reservation(5, range(70, 82)))) == [2, 1, 0]
    assert made.verify() == []


@pytest.mark.parametrize(
    ("computed", "token_ids", "problem"),
    [
        (5, [], "runs back from 6 to 5"),
        (8, [], "does not go with 7 known tokens"),
        (6, [7], "does not go with 8 known tokens"),  # repeated
        (8, [7], "does not go with 8 known tokens"),
        (7, [-1], "negative token id"),
        (9, [7, 8, 9], "beyond the 8 slots held"),
    ],
)
def test_bad_progress_changes_nothing(computed: int, token_ids: Sequence[int], problem: str) -> None:
    made, session = manager()
    made.reserve(session, reservation(1, range(6)))
    made.progress(session, 1, 6, [6])
    with pytest.raises(Refused, match=problem):
        made.progress(session, 1, computed, token_ids)
    held = session.holdings[1]
    assert (held.computed, len(held.tokens)) == (6, 7)
    assert [block.block_id for block in made.progress(session, 1, 8, [7, 8])[1]] == [1]
    assert made.verify() == []


def test_progress_of_an_unknown_sequence_is_refused() -> None:
    made, session = manager()
    with pytest.raises(Refused, match="unknown sequence"):
        made.progress(session, 1, 1, [])


@pytest.mark.parametrize(
    ("lengths", "sizes", "common"),
    [
        ([48], [16], 48),
        ([48, 64], [16, 32], 32),
        ([48, 0], [16, 32], 0),
        ([64, 32], [16, 32], 32),
        ([60, 60], [12, 20], 60),
    ],
)
def test_groups_share_the_longest_length_of_whole_blocks(lengths: list[int], sizes: list[int], common: int) -> None:
    assert common_length(lengths, sizes) == common
