"""Stop strings: what is shown, what is held, whatever way the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.stops import StopMatcher


def run(matcher: StopMatcher, pieces: list[str]) -> list[str]:
    shown = [matcher.push(piece) for piece in pieces]
    return [*shown, matcher.flush()]


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character: the first string to complete, the longest of those that complete together."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "matched"),
    [
        (["BCDE"], ["A", "BC", "D", "EF"], ["A", "", "", "", ""], "BCDE"),
        (["BCDE", "CDX"], ["A", "BC", "D", "X"], ["A", "", "", "B", ""], "CDX"),
        (["abcd"], ["xab", "cx"], ["x", "abcx", ""], None),
        (["abcd"], ["xab", "c"], ["x", "", "abc"], None),
        (["aab"], ["aaa", "ab"], ["a", "a", ""], "aab"),
        (["b", "abc"], ["xabc"], ["xa", ""], "b"),
        (["bc", "abc"], ["xabc"], ["x", ""], "abc"),
        (["é!"], ["caf", "é", "!"], ["caf", "", "", ""], "é!"),
        (["a"], ["", "a", "more"], ["", "", "", ""], "a"),
    ],
)
def test_nothing_of_a_stop_string_leaks(stops: list[str], pieces: list[str], shown: list[str], matched: str) -> None:
    """A3"""
    matcher = StopMatcher(stops, (), include_stop=False)
    assert (run(matcher, pieces), matcher.matched) == (shown, matched)


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=4), max_size=10),
    st.booleans(),
)
def test_pieces_do_not_matter(stops: list[str], pieces: list[str], include: bool) -> None:
    matcher = StopMatcher(stops, (), include)
    shown = "".join(run(matcher, pieces))
    assert (shown, matcher.matched) == reference("".join(pieces), stops, include)


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1), st.text("abc", max_size=30))
def test_no_more_is_held_than_may_become_a_stop_string(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops, (), include_stop=False)
    shown = matcher.push(text)
    if matcher.matched is None:
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_special_tokens_match_though_they_are_hidden() -> None:
    """A5"""
    matcher = StopMatcher(["<end>"], ["<end>", "<other>"], include_stop=False)
    assert matcher.reads_hidden
    assert matcher.push("Hi.") == "Hi."
    assert matcher.push("<other>", hidden=True) == ""
    assert matcher.push("<end>", hidden=True) == ""
    assert matcher.matched == "<end>"


def test_stop_strings_of_hidden_and_visible_text() -> None:
    matcher = StopMatcher([".<end>\n"], ["<end>"], include_stop=False)
    assert [matcher.push("Hi."), matcher.push("<end>", hidden=True), matcher.push("x")] == ["Hi", "", ".x"]
    assert [matcher.push("Hi."), matcher.push("<end>", hidden=True), matcher.push("\nx")] == ["Hi", "", ""]
    assert matcher.matched == ".<end>\n"


def test_hidden_text_does_not_part_visible_stop_strings() -> None:
    matcher = StopMatcher(["BC", "<end>"], ["<end>", "<pad>"], include_stop=False)
    assert matcher.push("AB") == "A"
    assert matcher.push("<pad>", hidden=True) == ""
    assert matcher.push("C") == ""
    assert matcher.matched == "BC"


def test_included_stop_string_stays() -> None:
    matcher = StopMatcher(["<end>"], ["<end>"], include_stop=True)
    assert matcher.push("Hi") + matcher.push("<end>", hidden=True) == "Hi<end>"


def test_long_patterns_cost_little() -> None:
    """S5: sixteen long strings that nearly match everywhere."""
    matcher = StopMatcher(["a" * 1023 + chr(ord("b") + n) for n in range(16)], (), include_stop=False)
    text = "a" * 20_000
    shown = matcher.push(text)
    assert (len(shown), matcher.matched) == (20_000 - 1023, None)
    assert matcher.push("z") == "a" * 1023 + "z"
