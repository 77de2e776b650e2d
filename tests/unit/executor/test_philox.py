"""Philox4x32-10 against Random123's published vectors, and the layout that other implementations must follow."""

import numpy as np
import pytest

from services.executor.sampling import philox
from services.executor.sampling.philox import NoiseKey

KNOWN = [  # counter, key, result: kat_vectors of Random123
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter, key, result):
    words = philox.philox4x32(np.array(counter, np.uint64)[:, None], *(np.array([k], np.uint64) for k in key))
    assert words[:, 0].tolist() == result


def words_of(seed=1, choice=0, position=0, count=64):
    return philox.all_words(NoiseKey(seed, choice, position), count)


def test_layout_matches_the_documentation():
    key = NoiseKey(seed=(7 << 32) | 5, choice=3, position=11)
    expected = []
    for token in range(9):
        counter = np.array([[token // 4], [key.position], [key.choice], [0]], np.uint64)
        results = philox.philox4x32(counter, np.array([5], np.uint64), np.array([7], np.uint64))
        expected.append(int(results[token % 4, 0]))
    assert philox.all_words(key, 9).tolist() == expected
    assert philox.words([key], [np.array([8, 0, 5])])[0].tolist() == [expected[8], expected[0], expected[5]]


def test_one_pass_over_many_keys_equals_one_each():
    keys = [NoiseKey(1, 0, 0), NoiseKey(-5, 2, 9), NoiseKey(1 << 62, 1, 3)]
    ids = [np.array([3]), np.array([1, 4, 1000]), np.array([], np.int64)]
    together = philox.words(keys, ids)
    assert [part.tolist() for part in together] == [
        philox.all_words(key, 1001)[wanted].tolist() for key, wanted in zip(keys, ids, strict=True)
    ]


def test_negative_seeds_are_their_64_bits():
    assert (words_of(seed=-1) == words_of(seed=2**64 - 1)).all()


@pytest.mark.parametrize("other", [{"seed": 2}, {"seed": 1 + (1 << 40)}, {"choice": 1}, {"position": 1}])
def test_every_key_part_matters(other):
    assert (words_of(**other) != words_of()).mean() > 0.9


def test_uniform_is_open_and_exact():
    extremes = np.array([0, 0xFFFFFFFF], np.uint32)
    assert philox.uniform(extremes).dtype == np.float32
    assert philox.uniform(extremes).tolist() == [2.0**-24, 1 - 2.0**-24]
    assert philox.gumbel(extremes).tolist() == pytest.approx([-2.8115, 16.6355], abs=1e-3)


def test_moments_of_the_noise():
    noise = philox.gumbel(words_of(seed=9, count=200_000)).astype(np.float64)
    assert abs(noise.mean() - np.euler_gamma) < 0.01
    assert abs(noise.var() - np.pi**2 / 6) < 0.03
