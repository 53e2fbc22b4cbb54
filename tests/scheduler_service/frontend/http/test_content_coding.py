"""Compressed bodies are read like others, within the same limits."""

import gzip
import json
import zlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from scheduler_service.frontend.config import MAX_PUBLIC_MESSAGE_BYTES
from scheduler_service.frontend.http.content_coding import CODINGS, MAX_MEMBERS, Decoder
from tests.support.event_loops import unoccupied_loop
from tests.support.http_frontends import HttpServed

JSON = {"content-type": "application/json"}


def bare_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


def compress_zstd(data: bytes) -> bytes:
    compressed: bytes = import_module("compression.zstd").compress(data)
    return compressed


COMPRESSORS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "two members of gzip": ("gzip", lambda d: gzip.compress(d[:9]) + gzip.compress(d[9:])),
    "deflate": ("deflate", zlib.compress),
    "deflate without zlib's header": ("deflate", bare_deflate),
}
if "zstd" in CODINGS:  # Python 3.14
    COMPRESSORS["zstd"] = ("zstd", compress_zstd)


@pytest.fixture(params=COMPRESSORS)
def coded(request: pytest.FixtureRequest) -> tuple[str, Callable[[bytes], bytes]]:
    """A coding and its compressor."""
    return COMPRESSORS[request.param]


Coded = tuple[str, Callable[[bytes], bytes]]


async def test_a_compressed_body_is_read_like_another(served: HttpServed, coded: Coded) -> None:
    coding, compress = coded
    text = "".join(f"hello {number} " for number in range(9_000))
    plain = json.dumps({"prompt": text}).encode()
    expected = await served.client.post("/tokenize", content=plain, headers=JSON)
    for name in (coding, coding.upper(), f"identity, {coding}"):
        headers = JSON | {"content-encoding": name}
        answer = await served.client.post("/tokenize", content=compress(plain), headers=headers)
        assert answer.status_code == 200
        assert answer.json() == expected.json()


async def test_identity_is_no_coding_and_x_gzip_is_gzip(served: HttpServed) -> None:
    plain = b'{"prompt":"a"}'
    bodies = dict.fromkeys(("identity", "", "Identity, identity"), plain)
    for name, body in (bodies | {"x-gzip": gzip.compress(plain)}).items():
        headers = JSON | {"content-encoding": name}
        answer = await served.client.post("/tokenize", content=body, headers=headers)
        assert answer.status_code == 200


@pytest.mark.parametrize("coding", ["br", "compress", "lzma", "gzip, gzip", "x" * 5000, "gzip;q=1"])
async def test_other_codings_are_refused_with_those_that_are_accepted(
    served: HttpServed, coding: str
) -> None:
    headers = JSON | {"content-encoding": coding}
    answer = await served.client.post("/v1/completions", content=b"{}", headers=headers)
    assert answer.status_code == 415
    assert answer.headers["accept-encoding"] == ", ".join(CODINGS)
    error = answer.json()["error"]
    assert error["code"] == "unsupported_content_encoding"
    assert error["message"].startswith("Content-Encoding: expected one of gzip, deflate")
    assert error["message"].endswith(f"got {coding[:100]!r}")


@pytest.mark.usefixtures("frozen_heap")
async def test_a_small_body_that_expands_beyond_the_limit_is_refused(
    served: HttpServed, coded: Coded
) -> None:
    coding, compress = coded
    bomb = compress(b" " * (2 * MAX_PUBLIC_MESSAGE_BYTES))
    assert len(bomb) < MAX_PUBLIC_MESSAGE_BYTES
    async with unoccupied_loop():
        answer = await served.client.post(
            "/v1/completions", content=bomb, headers=JSON | {"content-encoding": coding}
        )
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


def test_a_bomb_is_decoded_in_pieces_of_bounded_size(coded: Coded) -> None:
    coding, compress = coded
    pieces = list(Decoder(coding).decode(compress(bytes(50 << 20))))
    assert sum(map(len, pieces)) == 50 << 20
    assert max(map(len, pieces)) <= 2 << 20


def test_a_body_is_decoded_wherever_it_is_cut(coded: Coded) -> None:
    coding, compress = coded
    plain = bytes(range(256)) * 20
    body = compress(plain)
    for size in (1, 2, 3, 7, 1000):
        decoder = Decoder(coding)
        decoded = b""
        for start in range(0, len(body), size):
            decoded += b"".join(decoder.decode(body[start : start + size]))
        assert decoded == plain
        assert decoder.is_complete


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda body: body[:-3],
    "garbage": lambda body: b"\x07" + b"garbage" * 9,
    "plain": lambda body: b'{"prompt":"a"}',
    "more": lambda body: body + b"garbage",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
async def test_a_damaged_body_is_refused_by_its_coding(
    served: HttpServed, coded: Coded, damage: Callable[[bytes], bytes]
) -> None:
    coding, compress = coded
    body = damage(compress(b'{"prompt":"hello hello hello"}'))
    answer = await served.client.post(
        "/tokenize", content=body, headers=JSON | {"content-encoding": coding}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_body"
    assert answer.json()["error"]["message"].startswith(f"the body is not valid {coding}: ")


def test_empty_streams_one_after_the_other_are_refused_by_their_number() -> None:
    empty = gzip.compress(b"")
    assert b"".join(Decoder("gzip").decode(empty * MAX_MEMBERS)) == b""
    with pytest.raises(ValueError, match="more than 1000 compressed streams"):
        list(Decoder("gzip").decode(empty * (MAX_MEMBERS + 1)))


async def test_a_request_without_a_body_may_name_a_coding(served: HttpServed) -> None:
    answer = await served.client.get("/v1/models", headers={"content-encoding": "gzip"})
    assert answer.status_code == 200
    empty: dict[str, Any] = {"content": b"", "headers": JSON | {"content-encoding": "gzip"}}
    answer = await served.client.post("/tokenize", **empty)
    assert "not valid JSON" in answer.json()["error"]["message"]
