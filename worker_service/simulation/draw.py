"""The draw of sampling.proto, one at a time and in plain integers.

`worker_service/sampling/philox.py` draws for whole batches with numpy, which for a single draw takes
ten times as long.
"""

NUM_ROUNDS = 10
DRAW_BITS = 53
_WORD = 2**32 - 1


def draw(seed: int, choice_index: int, position: int) -> int:
    """53 random bits for a choice at an output position (Philox4x32-10, Salmon et al. 2011)."""
    key0, key1 = seed & _WORD, seed >> 32
    word0, word1, word2, word3 = choice_index, position, 0, 0
    for _ in range(NUM_ROUNDS):
        product0, product2 = word0 * 0xD2511F53, word2 * 0xCD9E8D57
        word0, word1 = (product2 >> 32) ^ word1 ^ key0, product2 & _WORD
        word2, word3 = (product0 >> 32) ^ word3 ^ key1, product0 & _WORD
        key0, key1 = (key0 + 0x9E3779B9) & _WORD, (key1 + 0xBB67AE85) & _WORD
    return (word0 << 32 | word1) >> 11
