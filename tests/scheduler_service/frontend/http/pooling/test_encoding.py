"""Numbers in answers are those that the model computed."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.frontend.http.pooling.encoding import BY_TYPE, float_list, rounded

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(FLOATS, min_size=1))
def test_what_reads_numbers_gets_the_same_float32(numbers: list[float]) -> None:
    vector = np.array(numbers, np.float32)
    found = np.array(json.loads(float_list(vector)), np.float64).astype(np.float32)
    assert found.tobytes() == vector.tobytes()
    assert np.float32(rounded(numbers[0])) == vector[0]


def test_numbers_have_about_as_many_digits_as_a_float32() -> None:
    vector = np.array([0.1, -1 / 3, 12345.678, 0.0], np.float32)
    assert float_list(vector) == b"[0.1000000015,-0.333333343,12345.67773,0.0]"


def test_a_vector_of_zeros_has_integers_and_bits_of_zeros() -> None:
    vector = np.zeros(8, np.float32)
    expected = {"int8": [0] * 8, "uint8": [128] * 8, "ubinary": [0], "binary": [-128]}
    assert {name: json.loads(BY_TYPE[name](vector)) for name in expected} == expected
