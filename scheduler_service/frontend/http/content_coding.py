"""Compressed request bodies: what `Content-Encoding` names, decoded in pieces of bounded size.

Python's own libraries decode them: `gzip` and `deflate`, from Python 3.14 on `zstd` too.
"""

import zlib
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

PIECE_BYTES = 1 << 20
"""Decoded at a time, in a few milliseconds."""
MAX_MEMBERS = 1000
"""Compressed streams in one body, one after the other."""
ZSTD_WINDOW_LOG = 23
"""The logarithm of the largest window of zstd in HTTP, 8 MiB (RFC 9659)."""


class _Zlib:
    """zlib's decompressor, with the interface of Python's others."""

    eof, needs_input, unused_data = False, True, b""

    def __init__(self, wbits: int) -> None:
        self._zlib = zlib.decompressobj(wbits)

    def decompress(self, data: bytes, max_length: int) -> bytes:
        piece = self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)
        self.needs_input = len(piece) < max_length
        self.eof, self.unused_data = self._zlib.eof, self._zlib.unused_data
        return piece


def _deflate(data: bytes) -> _Zlib:
    """zlib's format, or deflate's alone, which some clients send under that name."""
    return _Zlib(zlib.MAX_WBITS if data[0] & 0x0F == 8 else -zlib.MAX_WBITS)


CODINGS: dict[str, Callable[[bytes], Any]] = {
    "gzip": lambda _: _Zlib(16 + zlib.MAX_WBITS),
    "deflate": _deflate,
}
"""Decompressors by coding, for a stream that begins with the given bytes."""

try:
    _zstd = import_module("compression.zstd")
except ImportError:  # before Python 3.14
    pass
else:
    _options = {_zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG}
    CODINGS["zstd"] = lambda _: _zstd.ZstdDecompressor(options=_options)


class Decoder:
    """Decodes one body."""

    def __init__(self, coding: str) -> None:
        """`coding`: one of `CODINGS`."""
        self._make = CODINGS[coding]
        self._stream: Any = None
        self._num_members = 0

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing; an empty body is complete."""
        return self._stream is None or bool(self._stream.eof)

    def decode(self, data: bytes) -> Iterator[bytes]:
        """The pieces that the next part of the body decodes to. Raises ValueError if it is invalid,
        with the library's reason."""
        while data:
            if self.is_complete:
                self._begin_member(data)
            yield from self._pieces(data)
            data = self._stream.unused_data

    def _begin_member(self, data: bytes) -> None:
        self._num_members += 1
        if self._num_members > MAX_MEMBERS:
            raise ValueError(f"more than {MAX_MEMBERS} compressed streams")
        self._stream = self._make(data)

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        while True:
            try:
                piece: bytes = self._stream.decompress(data, PIECE_BYTES)
            except Exception as error:  # each library has its own
                raise ValueError(str(error)) from error
            yield piece
            if self._stream.eof or self._stream.needs_input:
                return
            data = b""
