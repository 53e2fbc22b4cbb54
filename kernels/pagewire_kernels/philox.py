"""Counter-based random numbers: Philox4x32-10, vectorized over the batch or one at a time.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. There is no
state: a draw is a pure function of a key and a counter. A sequence's tokens therefore depend
neither on the rest of the batch nor on whether it was preempted, migrated or recomputed.
"""

import numpy as np
import numpy.typing as npt

NUM_ROUNDS = 10
DRAW_BITS = 53
_WORD = 0xFFFFFFFF

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_ROUNDS = np.arange(NUM_ROUNDS, dtype=np.uint64).reshape(-1, 1, 1)
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)

Words = npt.NDArray[np.uint32]


def philox4x32(counter: Words, key: Words) -> Words:
    """Return four random words for each counter.

    counter: uint32 [n, 4]; key: uint32 [n, 2]. Returns uint32 [n, 4].
    """
    # Words are held in 64 bits, and both halves of a round are one operation on [2, n] arrays:
    # batches are small, so the number of operations determines the time.
    words = counter.astype(np.uint64).T
    multiplied, mixed = words[0::2], words[1::2]
    keys = (key.astype(np.uint64).T + _ROUNDS * _WEYL) & _LOW_WORD
    for round_key in keys:
        product = (multiplied * _MULTIPLIERS)[::-1]
        multiplied, mixed = (product >> _WORD_BITS) ^ mixed ^ round_key, product & _LOW_WORD
    output = np.empty((len(counter), 4), np.uint32)
    output[:, 0::2], output[:, 1::2] = multiplied.T, mixed.T
    return output


def uniform(
    seeds: npt.NDArray[np.uint64],
    choice_indices: npt.NDArray[np.uint32],
    positions: npt.NDArray[np.integer],
) -> npt.NDArray[np.float64]:
    """Return one draw from [0, 1) per row, with 53 random bits.

    The key is the seed, low word first; the counter is (choice index, output position, 0, 0).
    All arguments: [n]. Returns float64 [n].
    """
    key = np.stack([seeds & _LOW_WORD, seeds >> _WORD_BITS], axis=1).astype(np.uint32)
    counter = np.zeros((len(seeds), 4), np.uint32)
    counter[:, 0] = choice_indices
    counter[:, 1] = positions
    words = philox4x32(counter, key).astype(np.uint64)
    bits = (words[:, 0] << _WORD_BITS | words[:, 1]) >> np.uint64(64 - DRAW_BITS)
    return bits.astype(np.float64) * 2.0**-DRAW_BITS


def draw_bits(seed: int, choice_index: int, position: int) -> int:
    """Return the 53 bits of one draw of `uniform`. numpy would take ten times as long."""
    key0, key1 = seed & _WORD, seed >> 32
    word0, word1, word2, word3 = choice_index, position, 0, 0
    for _ in range(NUM_ROUNDS):
        product0, product2 = word0 * 0xD2511F53, word2 * 0xCD9E8D57
        word0, word1 = (product2 >> 32) ^ word1 ^ key0, product2 & _WORD
        word2, word3 = (product0 >> 32) ^ word3 ^ key1, product0 & _WORD
        key0, key1 = (key0 + 0x9E3779B9) & _WORD, (key1 + 0xBB67AE85) & _WORD
    return (word0 << 32 | word1) >> 64 - DRAW_BITS
