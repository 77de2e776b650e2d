"""KV formats by age: text form, ages, and changes that agree with them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.kv_policy import OLDEST, PERIOD, ColderAge, KvPolicy

DEFAULT = KvPolicy((ColderAge("int8", 512), ColderAge("int4", 2048)))


@pytest.mark.parametrize("text", ["", "hot:512,int8", "hot:512,int8:2048,int4", "hot:64,fp8:100,int4"])
def test_text_form_is_read_back(text: str) -> None:
    assert str(KvPolicy.parse(text)) == text


def test_a_policy_says_what_its_text_says() -> None:
    assert KvPolicy.parse("hot:512,int8:2048,int4") == DEFAULT


@pytest.mark.parametrize(
    "text",
    ["hot", "hot:512", "int8", "int8:512,int4", "hot:512,int8:512,int4", "hot:512,int8:100,int4", "hot:0,int8",
     "hot:5,int8:9,int8", "hot:5,bf16", "hot:-5,int8", "hot:5,int8,", "hot:5,hot", "hot:5;int8", "hot:5,int8:7",
     "hot:1000000000,int8"],
)  # fmt: skip
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="KV"):
        KvPolicy.parse(text)


def test_no_policy_is_beyond_what_its_text_can_say() -> None:
    longest = KvPolicy.named("hot+warm", OLDEST - 1)
    assert KvPolicy.parse(str(longest)) == longest
    with pytest.raises(ValueError, match="below 1000000000"):
        KvPolicy.named("hot+warm", OLDEST)


def test_names_of_policies() -> None:
    assert KvPolicy.named("hot") == KvPolicy()
    assert str(KvPolicy.named("hot+warm")) == "hot:512,int8"
    assert KvPolicy.named("hot+warm+cold") == DEFAULT
    assert str(KvPolicy.named("hot+warm+cold", 128, 256)) == "hot:128,int8:256,int4"
    for name, warm_tokens in (("warm", 2048), ("hot+warm+cold", 512)):
        with pytest.raises(ValueError, match=r"none of|greater age"):
            KvPolicy.named(name, warm_tokens=warm_tokens)


@given(
    st.sampled_from([KvPolicy(), DEFAULT, KvPolicy.parse("hot:1,int8"), KvPolicy.parse("hot:64,fp8:100,int4")]),
    st.sampled_from([8, 32, 128]),
    st.integers(0, 4000),
)
def test_counts_are_those_of_the_ages(policy: KvPolicy, block_size: int, length: int) -> None:
    ages = [policy.age(position, block_size, length) for position in range(-(-length // block_size))]
    assert policy.counts(block_size, length) == [ages.count(age) for age in range(len(policy.colder) + 1)]


def test_ages_of_a_long_sequence() -> None:
    ages = [DEFAULT.age(position, 32, 4096) for position in range(128)]
    assert ages == [0] + [2] * 63 + [1] * 48 + [0] * 16


def test_the_first_block_stays_hot() -> None:
    assert DEFAULT.age(0, 32, 1 << 20) == 0


policies = st.builds(
    lambda hot, more: KvPolicy(tuple(ColderAge(f, a) for f, a in zip(("int8", "int4"), (hot, *more), strict=False))),
    st.integers(1, 700) | st.integers(690, 700),
    st.one_of(st.just(()), st.tuples(st.integers(701, 720) | st.integers(701, 2000))),
)


@given(policies, st.sampled_from([16, 32, 64, 128]), st.integers(0, 3000), st.integers(0, 1500))
def test_changes_lead_from_one_view_to_another(policy: KvPolicy, size: int, start: int, more: int) -> None:
    blocks = -(-(start + more) // size)
    view = [policy.age(position, size, start) for position in range(blocks)]
    lengths = []
    for change in policy.changes(size, start, start + more):
        assert change.length % PERIOD == 0
        assert change.age == view[change.position] + 1 <= policy.age(change.position, size, change.length)
        view[change.position] = change.age
        lengths.append(change.length)
    assert lengths == sorted(lengths)
    assert view == [policy.age(position, size, start + more) for position in range(blocks)]
