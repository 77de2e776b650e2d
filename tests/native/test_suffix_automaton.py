"""The automaton against a search of the whole text."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kernels._native import SuffixAutomaton


def longest_repeat(text: list[int]) -> int:
    """The length of the longest suffix that ends elsewhere too."""
    size = len(text)
    return max(
        (length for length in range(1, size) if text[-length:] in (text[i : i + length] for i in range(size - length))),
        default=0,
    )


def check(automaton: SuffixAutomaton, text: list[int]) -> int:
    length, end, state = automaton.match()
    assert length == longest_repeat(text)
    if length:
        assert length <= end < len(text)
        assert text[end - length : end] == text[-length:]
    assert automaton.match() == (length, end, state)
    assert bool(state) == bool(length)
    return end


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.booleans(), min_size=40, max_size=40))
def test_finds_the_longest_suffix_that_occurred_before(text: list[int], asked: list[bool]) -> None:
    """Whenever it is asked: asking changes where later matches are found, never how long they are."""
    automaton = SuffixAutomaton()
    for size, (token, is_asked) in enumerate(zip(text, asked, strict=False), 1):
        automaton.add([token])
        if is_asked:
            check(automaton, text[:size])
    check(automaton, text)


def test_a_larger_alphabet() -> None:
    rng = random.Random(4)
    text: list[int] = []
    automaton = SuffixAutomaton()
    for _ in range(60):
        some = [rng.randrange(1000) for _ in range(3)]
        if text and rng.random() < 0.7:
            at = rng.randrange(len(text))
            some = text[at : at + 4]
        text += some
        automaton.add(some)
        check(automaton, text)


def test_prefers_the_latest_place_that_it_knows() -> None:
    text = [1, 2, 7, 1, 2, 8, 1, 2]
    automaton = SuffixAutomaton()
    ends = []
    for size, token in enumerate(text, 1):
        automaton.add([token])
        ends.append(check(automaton, text[:size]))
    assert ends[4] == 2
    assert ends[7] == 5


def test_states_are_fewer_than_two_a_token() -> None:
    for text in ([0, 1] * 200, [0] * 400, [0, 0, 1] * 100, [random.Random(3).randrange(3) for _ in range(400)]):
        automaton = SuffixAutomaton()
        automaton.add(text)
        assert automaton.size == len(text)
        assert automaton.state_count <= 2 * len(text)
