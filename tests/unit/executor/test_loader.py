"""The pool is sized by what is free beside the weights."""

import pytest

from services.common.errors import QuireError
from services.executor import loader
from services.executor.memory import MemoryView
from services.executor.settings import ExecutorSettings
from tests.unit.executor.fake_backend import FakeBackend

BLOCK_BYTES = 32 * 64


def blocks(monkeypatch: pytest.MonkeyPatch, mapped_bytes: int, **asked: object) -> int:
    """How many an executor gets of 100 blocks' worth of free memory."""
    monkeypatch.setattr(loader, "measure", lambda: MemoryView(100 * BLOCK_BYTES, "machine", ()))
    settings = ExecutorSettings.model_validate(asked)
    return loader.allocate(FakeBackend(), settings, mapped_bytes).block_count


def test_mapped_weights_are_not_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blocks(monkeypatch, 0) == 25
    assert blocks(monkeypatch, 60 * BLOCK_BYTES) == 10
    assert blocks(monkeypatch, 10 * BLOCK_BYTES, kv_memory=str(90 * BLOCK_BYTES)) == 90


@pytest.mark.parametrize("mapped", [60, 200])
def test_what_the_weights_leave_must_do(monkeypatch: pytest.MonkeyPatch, mapped: int) -> None:
    with pytest.raises(QuireError, match="kv_memory"):
        blocks(monkeypatch, mapped * BLOCK_BYTES, kv_memory=str(50 * BLOCK_BYTES))


def test_more_blocks_than_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blocks(monkeypatch, 0, kv_blocks=100) == 100
    with pytest.raises(QuireError, match=r"kv_blocks: 101 take .* are free"):
        blocks(monkeypatch, 0, kv_blocks=101)
