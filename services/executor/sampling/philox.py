"""Random numbers that belong to a request: Philox4x32-10, keyed by (seed, choice, output position, token id).

Any implementation (NumPy here, C++ and Triton elsewhere) must produce the same words from this layout:

    key     k0 = seed mod 2^32              k1 = (seed div 2^32) mod 2^32        (seed as 64 bits, two's complement)
    counter c0 = token_id div 4             c1 = output position (0 for the first output token)
            c2 = choice                     c3 = 0: purpose, 0 is token noise; other purposes take other values
    word    token_id mod 4 of the four 32-bit results belongs to the token

A word w becomes u = ((w >> 9) + 0.5) * 2^-23 (exact in fp32, never 0 or 1) and g = -log(-log(u)) in fp32.
Neither batch, chunking nor resumption enters, so a resumed sequence draws the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

UInt32 = NDArray[np.uint32]
UInt64 = NDArray[np.uint64]
Float32 = NDArray[np.float32]

TOKEN_NOISE = 0
ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


class NoiseKey(NamedTuple):
    """What one token's noise belongs to."""

    seed: int  # 64 bits
    choice: int
    position: int  # in the output, from 0


def philox4x32(counter: UInt64, k0: UInt64, k1: UInt64) -> UInt64:
    """Ten rounds over counters [4, n] whose 64-bit words hold 32-bit values, in place; keys [1] or [n]."""
    c0, c1, c2, c3 = counter
    product0, product1 = np.empty_like(c0), np.empty_like(c2)
    for _ in range(ROUNDS):
        np.multiply(c0, _MULTIPLIERS[0], out=product0)
        np.multiply(c2, _MULTIPLIERS[1], out=product1)
        np.right_shift(product1, _HALF, out=c0)
        c0 ^= c1
        c0 ^= k0
        np.right_shift(product0, _HALF, out=c2)
        c2 ^= c3
        c2 ^= k1
        np.bitwise_and(product1, _MASK, out=c1)
        np.bitwise_and(product0, _MASK, out=c3)
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return counter


def words(keys: Sequence[NoiseKey], token_ids: Sequence[NDArray[np.int64]]) -> list[UInt32]:
    """The words of token_ids[i], in their order, under keys[i]; one pass over all of them."""
    counts = [len(ids) for ids in token_ids]
    wanted = np.concatenate(token_ids)
    counter = np.zeros((4, len(wanted)), np.uint64)
    counter[0] = wanted >> 2
    counter[1] = np.repeat(np.array([key.position for key in keys], np.uint64), counts)
    counter[2] = np.repeat(np.array([key.choice for key in keys], np.uint64), counts)
    counter[3] = TOKEN_NOISE
    seeds = np.repeat(np.array([key.seed & 0xFFFFFFFFFFFFFFFF for key in keys], np.uint64), counts)
    results = philox4x32(counter, seeds & _MASK, seeds >> _HALF)
    drawn = results[wanted & 3, np.arange(len(wanted))].astype(np.uint32)
    return np.split(drawn, np.cumsum(counts)[:-1])


def all_words(key: NoiseKey, vocab_size: int) -> UInt32:
    """The words of tokens 0 .. vocab_size - 1: a quarter of the work of asking for each."""
    counter = np.zeros((4, (vocab_size + 3) // 4), np.uint64)
    counter[0] = np.arange(counter.shape[1])
    counter[1], counter[2], counter[3] = key.position, key.choice, TOKEN_NOISE
    seed = np.array([key.seed & 0xFFFFFFFFFFFFFFFF], np.uint64)
    results = philox4x32(counter, seed & _MASK, seed >> _HALF)
    drawn = np.empty((counter.shape[1], 4), np.uint32)
    drawn[:] = results.T
    return drawn.reshape(-1)[:vocab_size]


def uniform(drawn: UInt32) -> Float32:
    """Words as numbers strictly between 0 and 1."""
    numbers = (drawn >> np.uint32(9)).astype(np.float32)
    numbers += np.float32(0.5)
    numbers *= np.float32(2.0**-23)
    return numbers


def gumbel(drawn: UInt32) -> Float32:
    """Words as standard Gumbel noise, within [-2.82, 16.64]: argmax(log p + noise) is a draw from p."""
    noise = uniform(drawn)
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return noise
