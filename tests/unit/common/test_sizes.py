from __future__ import annotations

import pytest

from services.common.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 << 30), ("500MB", 500 * 10**6), ("1.5 kib", 1536), ("7", 7), ("3B", 3), ("1TiB", 1 << 40)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "2 parsecs", "-1", "nan", "1e3", "auto", "9" * 400])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no size such as"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2 << 30, "2 GiB"), (1 << 50, "1024 TiB")]
)
def test_sizes_are_written(size: int, text: str) -> None:
    assert format_size(size) == text
