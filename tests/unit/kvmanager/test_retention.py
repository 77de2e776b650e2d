"""Quotas as people write them."""

from __future__ import annotations

import pytest

from services.kvmanager.retention import Quota, parse_quotas


def test_shares_and_sizes_by_namespace() -> None:
    quotas = parse_quotas("a=25%, b=2KiB,c=d=0.5%,=10%,")
    assert quotas == {"a": Quota(share=0.25), "b": Quota(size=2048), "c=d": Quota(share=0.005), "": Quota(share=0.1)}
    assert parse_quotas("") == {}


def test_as_blocks_of_a_pool() -> None:
    assert Quota(share=0.25).blocks(10, 0) == 2
    assert Quota(size=2048).blocks(10, 500) == 4
    assert Quota(share=0.0).blocks(10, 0) == 0


@pytest.mark.parametrize("text", ["a", "a=", "a=x", "a=-1%", "a=101%", "a=nan%", "a=x%", "a=1%,a=2%", "a=1XB"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        parse_quotas(text)
