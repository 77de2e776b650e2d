"""Every token counts once, with as much before it as was promised."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.executor.eval.windows import Window, pieces, windows


@pytest.mark.parametrize(
    ("count", "context", "stride", "prefix", "expected"),
    [
        (10, 4, 2, 0, [(0, 1, 4), (2, 4, 6), (4, 6, 8), (6, 8, 10)]),
        (9, 4, 2, 0, [(0, 1, 4), (2, 4, 6), (4, 6, 8), (6, 8, 9)]),
        (9, 4, 4, 0, [(0, 1, 4), (4, 5, 8)]),  # the last window has one token and nothing before it
        (9, 4, 4, 1, [(0, 0, 3), (3, 3, 6), (6, 6, 9)]),
        (7, 4, 1, 1, [(0, 0, 3), (1, 3, 4), (2, 4, 5), (3, 5, 6), (4, 6, 7)]),
        (3, 100, 50, 0, [(0, 1, 3)]),
        (3, 2, 1, 1, [(0, 0, 1), (1, 1, 2), (2, 2, 3)]),
    ],
)
def test_windows(count: int, context: int, stride: int, prefix: int, expected: list[tuple[int, int, int]]) -> None:
    assert windows(count, context, stride, prefix) == [Window(*bounds) for bounds in expected]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_each_token_counts_once_with_enough_before_it(data: st.DataObject) -> None:
    context = data.draw(st.integers(2, 40))
    stride = data.draw(st.integers(1, context))
    prefix = data.draw(st.integers(0, 1))
    count = data.draw(st.integers(1, 150))
    scored = []
    for window in windows(count, context, stride, prefix):
        assert window.stop - window.start + prefix <= context
        assert window.scored > 0
        for token in range(window.first, window.stop):
            before = token - window.start + prefix
            assert before >= 1
            assert window.start == 0 or before >= context - stride
        scored += range(window.first, window.stop)
    overlapping = stride < context
    expected = [at for at in range(count) if prefix or (at if overlapping else at % context)]
    assert scored == expected


def test_pieces() -> None:
    assert list(pieces(3, 12, 4)) == [range(3, 7), range(7, 11), range(11, 12)]
    assert list(pieces(3, 3, 4)) == []
