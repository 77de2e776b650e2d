"""What the draft model's blocks hold: accepted tokens alone, and nothing that another sequence left in them."""

from __future__ import annotations

from services.executor.backends.base import SamplingRule
from services.executor.sequences import Ending, Sequence
from services.executor.speculation.draft_cache import DraftCache


def sequence(number: int, tokens: list[int]) -> Sequence:
    return Sequence(number, tokens, len(tokens), 0, SamplingRule(), Ending(frozenset(), 1000))


def test_drafts_that_became_tokens_stay_and_others_do_not() -> None:
    cache, one = DraftCache(4, 16), sequence(1, [1, 2, 3])
    cache.enter(1, [5, 6, 7], 0)
    assert cache.computed(one) == 0
    cache.wrote(one, 5, [8, 9, 7])  # the last draft is not computed
    one.tokens.extend([8, 4])
    assert cache.computed(one) == 4
    cache.wrote(one, 7, [1, 1, 1])
    one.tokens.extend([1, 1, 1, 2])
    assert cache.computed(one) == 7
    cache.wrote(one, 11, [3, 3, 3])
    one.tokens.append(4)
    assert cache.computed(one) == 9
    one.tokens.extend([3, 3])  # what was refused does not come to life again
    assert cache.computed(one) == 9
    assert cache.slots(one) == 12
    assert cache.gather([one]).tolist() == [[5, 6, 7]]


def test_shared_blocks_count_where_the_draft_model_filled_them() -> None:
    cache, first = DraftCache(4, 16), sequence(1, list(range(10)))
    cache.enter(1, [0, 1, 2], 0)
    cache.wrote(first, 6, [])
    assert cache.computed(first) == 6
    cache.enter(2, [0, 1, 8], 8)
    assert cache.computed(sequence(2, list(range(10)))) == 4
    cache.wrote(first, 10, [])
    cache.computed(first)
    cache.enter(3, [0, 1, 9], 8)
    assert cache.computed(sequence(3, list(range(10)))) == 8
    cache.enter(4, [0, 1, 10], 6)  # of a block in part, nothing is known
    assert cache.computed(sequence(4, list(range(10)))) == 4


def test_a_block_given_anew_holds_nothing() -> None:
    cache, first = DraftCache(4, 16), sequence(1, list(range(9)))
    cache.enter(1, [0, 1, 2], 0)
    cache.wrote(first, 9, [])
    cache.computed(first)
    cache.inventory.seal(0, b"k")
    cache.inventory.seal(1, b"l")
    cache.leave(1)
    cache.enter(2, [1], 0)  # now another's, who has not computed it yet
    cache.append(2, [3])
    cache.enter(3, [0, 1, 4], 8)
    assert cache.computed(sequence(3, list(range(9)))) == 4
    assert [(sealed.block_id, sealed.group_id) for sealed in cache.inventory.to_sealed_blocks()] == [(0, 1)]


def test_a_copy_holds_what_its_source_does() -> None:
    cache, first = DraftCache(4, 16), sequence(1, list(range(9)))
    cache.enter(1, [0, 1, 2], 0)
    cache.wrote(first, 9, [])
    cache.computed(first)
    cache.copied([(0, 5), (2, 1)])
    cache.enter(2, [5, 1, 6], 8)
    assert cache.computed(sequence(2, list(range(9)))) == 4
    cache.clear()
    cache.enter(2, [5, 1, 6], 8)
    assert cache.computed(sequence(2, list(range(9)))) == 0
