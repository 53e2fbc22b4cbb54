"""Random numbers that are functions of key and counter."""

import numpy as np
import pytest

from pagewire_kernels.philox import DRAW_BITS, draw_bits, philox4x32, uniform

# Random123, tests/kat_vectors: counter, key, output of philox4x32 with 10 rounds.
KNOWN_ANSWERS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_the_published_answers_come_out(counter: str, key: str, output: str) -> None:
    counters = np.array([words(counter)], np.uint32)
    keys = np.array([words(key)], np.uint32)
    assert philox4x32(counters, keys).tolist() == [words(output)]


def test_a_batch_gives_each_row_what_it_gets_alone() -> None:
    counters = np.array([words(counter) for counter, _, _ in KNOWN_ANSWERS], np.uint32)
    keys = np.array([words(key) for _, key, _ in KNOWN_ANSWERS], np.uint32)
    assert philox4x32(counters, keys).tolist() == [words(output) for _, _, output in KNOWN_ANSWERS]


def test_uniform_takes_key_and_counter_from_where_the_contract_says() -> None:
    seed, choice, position = 0xA4093822_299F31D0, 3, 17
    key = np.array([[seed & 0xFFFFFFFF, seed >> 32]], np.uint32)
    output = philox4x32(np.array([[choice, position, 0, 0]], np.uint32), key)[0]
    expected = ((int(output[0]) << 32 | int(output[1])) >> 11) / 2**53
    drawn = uniform(
        np.array([seed], np.uint64), np.array([choice], np.uint32), np.array([position])
    )
    assert drawn.tolist() == [expected]


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 5, 2**64 - 1])
def test_a_single_draw_is_that_of_a_batch(seed: int) -> None:
    for choice, position in ((0, 0), (3, 17), (2**32 - 1, 2**31)):
        drawn = uniform(
            np.array([seed], np.uint64), np.array([choice], np.uint32), np.array([position])
        )
        assert draw_bits(seed, choice, position) * 2.0**-DRAW_BITS == drawn[0]


def test_draws_are_uniform_and_differ_by_seed_choice_and_position() -> None:
    count = 20_000
    same, rising = np.zeros(count, np.int64), np.arange(count)
    for seeds, choices, positions in (
        (rising, same, same),
        (same, rising, same),
        (same, same, rising),
    ):
        draws = uniform(seeds.astype(np.uint64), choices.astype(np.uint32), positions)
        assert draws.min() >= 0.0
        assert draws.max() < 1.0
        assert len(np.unique(draws)) == count
        histogram = np.histogram(draws, bins=20, range=(0.0, 1.0))[0]
        chi_square = ((histogram - count / 20) ** 2 / (count / 20)).sum()
        # 19 degrees of freedom: beyond 50 once in ten thousand times.
        assert chi_square < 50
