"""Bytes of keys and values, by hand and by native code, and pools within a budget."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import _native
from services.common.kv_policy import PERIOD, ColderAge, KvPolicy
from services.executor.backends.base import ColderPool, KvShape
from services.executor.capacity import served_context
from services.executor.kv_bytes import KvDims, block_bytes, most_blocks_by_age, split_memory, token_bytes
from tests.fixtures.models import make_rand_model
from tests.native.packed_models import SETS, pack_model

LLAMA_8B = KvDims(layer_count=32, kv_head_count=8, key_size=128, value_size=128)
LLAMA_70B = KvDims(80, 8, 128, 128)
QWEN_7B = KvDims(28, 4, 128, 128)
SMOLLM2_135M = KvDims(30, 3, 64, 64)
BY_AGE = KvPolicy.named("hot+warm+cold")

policies = st.one_of(
    st.just(KvPolicy()),
    st.integers(1, 900).map(lambda hot: KvPolicy((ColderAge("int8", hot),))),
    st.tuples(st.integers(1, 900), st.integers(1, 1500)).map(
        lambda ages: KvPolicy((ColderAge("int8", ages[0]), ColderAge("int4", sum(ages))))
    ),
)
block_sizes = st.sampled_from([8, 16, 32, 64, 128])


@pytest.mark.parametrize(
    ("dims", "bytes_"), [(LLAMA_8B, 131_072), (LLAMA_70B, 327_680), (QWEN_7B, 57_344), (SMOLLM2_135M, 23_040)]
)
def test_a_token_in_bf16(dims: KvDims, bytes_: int) -> None:
    assert token_bytes(dims, "bf16") == token_bytes(dims, "fp16") == bytes_
    assert token_bytes(dims, "fp32") == 2 * bytes_
    assert block_bytes(dims, "bf16", 32) == 32 * bytes_


def test_narrow_blocks_count_their_scales() -> None:
    # A head: 128 channels and 32 tokens of keys with a scale a channel, of values with a scale a token.
    int8 = 2 * 128 * 32 + 128 * 2 + 32 * 2
    int4 = 2 * 128 * 32 // 2 + 128 * 4 + 32 * 4
    assert block_bytes(LLAMA_8B, "int8", 32) == 32 * 8 * int8 == 2_179_072
    assert block_bytes(LLAMA_8B, "int4", 32) == 32 * 8 * int4 == 1_212_416
    assert block_bytes(KvDims(61, 1, 576, 0), "int8", 32) == 61 * (576 * 32 + 576 * 2)


def test_a_format_without_a_layout_is_named() -> None:
    with pytest.raises(ValueError, match="fp8"):
        block_bytes(LLAMA_8B, "fp8", 32)


@pytest.mark.parametrize(("layers", "kv_heads", "head_size"), [(2, 2, 16), (1, 4, 40), (3, 1, 64), (1, 2, 128)])
def test_native_code_takes_the_same_bytes(tmp_path: Path, layers: int, kv_heads: int, head_size: int) -> None:
    folder = make_rand_model(tmp_path / "m", layers=layers, heads=4, kv_heads=kv_heads, head_size=head_size)
    model = pack_model(folder).native(_native.ThreadPool(1), SETS[0])
    dims = KvDims(layers, kv_heads, head_size, head_size).padded()
    for ours, native in (("fp32", "f32"), ("bf16", "bf16"), ("int8", "int8"), ("int4", "int4")):
        assert block_bytes(dims, ours, 32) == model.kv_block_bytes(native), ours


def test_blocks_on_the_way_to_4096_tokens() -> None:
    """At 4,096: hot are the first and 16 newest blocks, warm 48, cold 63. Until then five more hot and four warm."""
    assert BY_AGE.counts(32, 4096) == [17, 48, 63]
    assert most_blocks_by_age(BY_AGE, 32, 4096) == (22, 52, 63)
    assert most_blocks_by_age(BY_AGE, 32, 4097) == (22, 52, 63)
    assert most_blocks_by_age(KvPolicy(), 32, 4097) == (129,)
    assert most_blocks_by_age(BY_AGE, 32, 1) == (1, 0, 0)


@settings(deadline=None)
@given(policies, block_sizes, st.integers(1, 2600))
def test_most_blocks_is_what_a_simulated_sequence_holds(policy: KvPolicy, block_size: int, length: int) -> None:
    """Views before and after each change, with every copy that either reads, and those in between."""
    ages = range(len(policy.colder) + 1)
    most = [0] * len(ages)
    for now in {*range(0, length, PERIOD), *range(block_size, length, block_size), length - 1, length}:
        blocks = range(-(-min(now + 1, length) // block_size))
        before = [policy.age(position, block_size, max(now - 1, 0)) for position in blocks]
        after = [policy.age(position, block_size, now) for position in blocks]
        held = [sum(old <= age <= new for old, new in zip(before, after, strict=True)) for age in ages]
        most = list(map(max, most, held))
    assert most_blocks_by_age(policy, block_size, length) == tuple(most)


@given(policies, block_sizes, st.integers(1, 20_000), st.integers(1, 1 << 30), st.integers(0, 40))
def test_as_many_sequences_fit_into_each_pool(
    policy: KvPolicy, block_size: int, length: int, memory: int, least_hot: int
) -> None:
    sizes = [8192, 4288, 2432][: len(policy.colder) + 1]
    blocks = most_blocks_by_age(policy, block_size, length)
    cost = sum(size * count for size, count in zip(sizes, blocks, strict=True))
    try:
        pools = split_memory(memory, sizes, policy, block_size, length, least_hot)
    except ValueError:
        assert memory < max(cost, least_hot * sizes[0] + cost)
        return
    taken = sum(size * count for size, count in zip(sizes, pools, strict=True))
    assert memory - sizes[0] < taken <= memory
    assert pools[0] >= least_hot
    assert [bool(count) for count in pools[1:]] == [bool(count) for count in blocks[1:]]
    if least_hot <= memory * blocks[0] // cost:
        assert all(count // needed >= memory // cost for count, needed in zip(pools, blocks, strict=True) if needed)


def test_too_little_memory_is_refused() -> None:
    sizes = [8192, 4288, 2432]
    assert split_memory(8192 + 4288 + 2432, sizes, BY_AGE, 32, 500) == (1, 0, 0)
    with pytest.raises(ValueError, match="too few blocks"):
        split_memory(8191, sizes, BY_AGE, 32, 500)
    with pytest.raises(ValueError, match="too few blocks"):
        split_memory(40 * 8192, sizes, BY_AGE, 32, 4096, least_hot=40)


@given(policies, block_sizes, st.integers(1, 60), st.integers(1, 60), st.integers(2, 4000))
def test_the_context_is_what_one_sequence_finds_room_for(
    policy: KvPolicy, block_size: int, hot: int, colder: int, context: int
) -> None:
    pools = tuple(ColderPool(age.format, 1, colder) for age in policy.colder)
    served = served_context(KvShape(block_size, 1, hot, pools), policy, context)
    assert 2 <= served <= context

    def fits(length: int) -> bool:
        counts = policy.most_counts(block_size, length)
        return all(count <= most for count, most in zip(counts, (hot, *(colder for _ in pools)), strict=True))

    assert all(fits(length) for length in range(1, served))
    assert served == context or not fits(served)
