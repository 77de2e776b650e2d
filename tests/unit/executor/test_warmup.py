"""Warm-up computes for real and refuses a model that does not."""

import pytest

from services.common.errors import QuireError, Reason
from services.executor.backends.base import KvShape
from services.executor.warmup import VERIFIED, verify_costs, warm_up
from tests.unit.executor.fake_backend import FakeBackend


@pytest.mark.parametrize("blocks", [1, 2, 64])
def test_measures_prefill_and_decode_within_the_pool(blocks):
    backend = FakeBackend()
    shape = KvShape(4, 256, blocks)
    backend.allocate_kv(shape)
    measured = warm_up(backend, shape, max_step_tokens=512, context_length=256)
    assert measured.decode_step_seconds > 0
    assert measured.prefill_tokens_per_second > 0
    assert max(sum(batch) for batch in backend.batches) <= blocks * 4


def test_a_pool_of_one_slot_is_enough():
    backend = FakeBackend()
    shape = KvShape(1, 64, 1)
    backend.allocate_kv(shape)
    assert warm_up(backend, shape, 512, 256).decode_step_seconds > 0


def test_non_finite_logits_fail_the_load():
    backend = FakeBackend()
    backend.bad_lengths = set(range(300))
    backend.allocate_kv(KvShape(4, 256, 8))
    with pytest.raises(QuireError) as raised:
        warm_up(backend, KvShape(4, 256, 8), 512, 256)
    assert raised.value.reason == Reason.MODEL_LOAD_FAILED


@pytest.mark.parametrize(("blocks", "most"), [(1, 4), (3, 12), (64, 17)])
def test_steps_with_drafts_are_measured_as_far_as_there_is_room(blocks, most):
    backend = FakeBackend()
    shape = KvShape(4, 256, blocks)
    backend.allocate_kv(shape)
    costs = verify_costs(backend, shape)
    assert [tokens for tokens, _ in costs] == [tokens for tokens in VERIFIED if tokens <= most]
    assert all(seconds > 0 for _, seconds in costs)
