"""Counter-based random numbers: Philox4x32-10, vectorised over the batch.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. There is no
state: a draw is a pure function of a key and a counter. So a sequence's tokens depend neither on
its neighbours in the batch nor on how often it was preempted, moved or computed again.
"""

import numpy as np
import numpy.typing as npt

NUM_ROUNDS = 10

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint32(0x9E3779B9)
_WEYL_1 = np.uint32(0xBB67AE85)
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)

Words = npt.NDArray[np.uint32]


def philox4x32(counter: Words, key: Words) -> Words:
    """Four random words for each counter.

    counter: uint32 [n, 4]; key: uint32 [n, 2]. Returns uint32 [n, 4].
    """
    c0, c1, c2, c3 = counter.T
    k0, k1 = key.T
    for _ in range(NUM_ROUNDS):
        high_0, low_0 = _multiply(c0, _MULTIPLIER_0)
        high_1, low_1 = _multiply(c2, _MULTIPLIER_1)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = k0 + _WEYL_0, k1 + _WEYL_1
    return np.stack([c0, c1, c2, c3], axis=1)


def uniform(
    seeds: npt.NDArray[np.uint64],
    choice_indices: npt.NDArray[np.uint32],
    positions: npt.NDArray[np.integer],
) -> npt.NDArray[np.float64]:
    """One draw from [0, 1) per row, with 53 random bits.

    The key is the seed, low word first; the counter is (choice index, output position, 0, 0).
    All arguments: [n]. Returns float64 [n].
    """
    key = np.stack([seeds & _LOW_WORD, seeds >> _WORD_BITS], axis=1).astype(np.uint32)
    counter = np.zeros((len(seeds), 4), np.uint32)
    counter[:, 0] = choice_indices
    counter[:, 1] = positions
    words = philox4x32(counter, key).astype(np.uint64)
    bits = (words[:, 0] << _WORD_BITS | words[:, 1]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _multiply(words: Words, multiplier: np.uint64) -> tuple[Words, Words]:
    """High and low words of the 64-bit products."""
    product = words.astype(np.uint64) * multiplier
    return (product >> _WORD_BITS).astype(np.uint32), product.astype(np.uint32)
