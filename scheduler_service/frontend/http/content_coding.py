"""Compressed request bodies: what `Content-Encoding` names, decoded in pieces of bounded size.

`gzip` and `deflate` come with Python. `zstd` needs Python 3.14 or the package backports.zstd, `br`
the package brotli from version 1.2 on: earlier ones cannot bound what a small body expands to.
"""

import zlib
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Protocol

PIECE_BYTES = 1 << 20
"""Decoded at a time, in a few milliseconds."""
MAX_MEMBERS = 1000
"""Compressed streams in one body, one after the other."""
ZSTD_WINDOW_LOG = 23
"""The logarithm of the largest window of zstd in HTTP, 8 MiB (RFC 9659)."""


class _Stream(Protocol):
    """One compressed stream: the interface of Python's own decompressors."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Zlib:
    eof, needs_input, unused_data = False, True, b""

    def __init__(self, wbits: int | None) -> None:
        """`wbits`: as for zlib; None: zlib's format, or deflate's alone, which some clients send
        under that name."""
        self._wbits = wbits
        self._zlib: Any = None

    def decompress(self, data: bytes, max_length: int) -> bytes:
        if self._zlib is None:
            if not data:
                return b""
            found = zlib.MAX_WBITS if data[0] & 0x0F == 8 else -zlib.MAX_WBITS
            self._zlib = zlib.decompressobj(found if self._wbits is None else self._wbits)
        piece: bytes = self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)
        self.needs_input = len(piece) < max_length
        self.eof, self.unused_data = self._zlib.eof, self._zlib.unused_data
        return piece


class _Brotli:
    unused_data = b""

    def __init__(self, library: Any) -> None:
        self._brotli = library.Decompressor()
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return bool(self._brotli.is_finished())

    def decompress(self, data: bytes, max_length: int) -> bytes:
        piece: bytes = self._brotli.process(data, output_buffer_limit=max_length)
        self.needs_input = not piece
        return piece


def _codings() -> dict[str, Callable[[], _Stream]]:
    """The codings whose libraries are installed."""
    codings: dict[str, Callable[[], _Stream]] = {
        "gzip": lambda: _Zlib(16 + zlib.MAX_WBITS),
        "deflate": lambda: _Zlib(None),
    }
    if zstd := _imported("compression.zstd") or _imported("backports.zstd"):
        options = {zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG}
        codings["zstd"] = lambda: zstd.ZstdDecompressor(options=options)
    brotli = _imported("brotli")
    if hasattr(getattr(brotli, "Decompressor", None), "can_accept_more_data"):  # 1.2
        codings["br"] = lambda: _Brotli(brotli)
    return codings


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        return None


CODINGS = _codings()


class Decoder:
    """Decodes one body."""

    def __init__(self, coding: str) -> None:
        """`coding`: one of `CODINGS`."""
        self._make = CODINGS[coding]
        self._stream = self._make()
        self._num_members = 1
        self._has_begun = False

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing; an empty body is complete."""
        return self._stream.eof or not self._has_begun

    def decode(self, data: bytes) -> Iterator[bytes]:
        """The pieces that the next part of the body decodes to. Raises ValueError if it is invalid,
        with the library's reason."""
        self._has_begun |= bool(data)
        while True:
            if self._stream.eof:
                if not data:
                    return
                self._next_member()
            try:
                piece = self._stream.decompress(data, PIECE_BYTES)
            except Exception as error:  # each library has its own
                raise ValueError(str(error)) from error
            yield piece
            if self._stream.eof:
                data = self._stream.unused_data
            elif self._stream.needs_input:
                return
            else:
                data = b""

    def _next_member(self) -> None:
        self._num_members += 1
        if self._num_members > MAX_MEMBERS:
            raise ValueError(f"more than {MAX_MEMBERS} compressed streams")
        self._stream = self._make()
