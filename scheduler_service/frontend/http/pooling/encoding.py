"""Answers as JSON, whose vectors are numbers, base64, integers or bits."""

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import to_json

Vector = NDArray[np.float32]

NUM_DIGITS = 9
"""Significant decimal digits that identify every float32."""

_EXPONENTS = np.array([*range(129), *range(-149, 0)])
_SCALES = 10.0 ** (NUM_DIGITS - 1 - np.floor(np.log10(2.0) * (_EXPONENTS - 1)))
"""By the binary exponent of a float32, which may be negative: by what it is multiplied so that its
integral part has NUM_DIGITS digits, or one more."""


def rounded(number: float) -> float:
    """The number with the fewest digits that is the same as a float32."""
    return float(f"{number:.{NUM_DIGITS}g}")


def float_list(vector: Vector) -> bytes:
    """Numbers with the digits of a float32, which what reads them gets back: as the float64 that
    JSON's numbers usually are, they would have twice as many, for nothing."""
    scales = _SCALES[np.frexp(vector)[1]]
    return to_json((np.rint(vector * scales) / scales).tolist())


def json_list(entries: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """A list of at least one entry, in pieces."""
    for number, entry in enumerate(entries):
        yield b"," if number else b"["
        yield from entry
    yield b"]"


def with_field(fields: Mapping[str, Any], name: str, value: Iterable[bytes]) -> Iterator[bytes]:
    """An object of at least one field and another one, whose value is JSON already, in pieces."""
    yield b'%b,"%b":' % (to_json(fields)[:-1], name.encode())
    yield from value
    yield b"}"


def base64_text(values: bytes) -> bytes:
    """A string."""
    return b'"%b"' % base64.b64encode(values)


def _int8(vector: Vector) -> NDArray[np.int64]:
    """Integers from -127 to 127, of which the greatest has this magnitude. Angles between vectors
    stay the same, except for rounding, and no vector depends on others."""
    return np.rint(vector * (127 / (np.abs(vector).max() or 1))).astype(np.int64)


def _bits(vector: Vector) -> NDArray[np.int64]:
    """The signs of eight numbers in each byte, from its highest bit on: 1 if positive."""
    return np.packbits(vector > 0).astype(np.int64)


BY_TYPE: Mapping[str, Callable[[Vector], bytes]] = {
    "float": float_list,
    "int8": lambda vector: to_json(_int8(vector).tolist()),
    "uint8": lambda vector: to_json((_int8(vector) + 128).tolist()),
    "ubinary": lambda vector: to_json(_bits(vector).tolist()),
    "binary": lambda vector: to_json((_bits(vector) - 128).tolist()),
    "base64": lambda vector: base64_text(vector.tobytes()),
}
"""How a vector is written, by Cohere's types of numbers."""


def by_type(types: Iterable[str], vectors: Sequence[Vector]) -> Iterator[bytes]:
    """An object with the vectors in the forms of several types, in pieces."""
    for number, name in enumerate(dict.fromkeys(types)):
        yield b'%b"%b":' % (b"," if number else b"{", name.encode())
        yield from json_list([BY_TYPE[name](vector)] for vector in vectors)
    yield b"}"
