"""Reads a recording's file, line by line."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from scheduler_service.replay.codec import Codec, Unreadable
from scheduler_service.replay.recording import CODEC, Entry, Header, decode_entry, decode_header
from scheduler_service.replay.recording_file import COMPRESSED


class BadRecording(Exception):
    """The file is no recording, or not one that this software can read; tells the line."""

    def __init__(self, path: Path, line: int, why: object) -> None:
        super().__init__(f"{path}, line {line}: {why}")


class RecordingReader:
    """A recording's header, and its entries as they are asked for."""

    def __init__(self, path: Path, codec: Codec = CODEC) -> None:
        """Read the header; raises BadRecording and OSError."""
        self.path = path
        self.is_truncated = False
        """Whether the file ends within a line, as when the core was killed; known at the end."""
        self._codec = codec
        with _open(path) as file:
            lines = self._lines(file)
            first = next(lines, None)
            if first is None:
                raise BadRecording(path, 1, "expected a header, the file ends before it")
            self.header: Header = self._decode(1, first, decode_header)

    def entries(self) -> Iterator[Entry]:
        """All inputs, from the first; raises BadRecording at the line that is wrong."""
        with _open(self.path) as file:
            for number, text in enumerate(self._lines(file), start=1):
                if number > 1:
                    yield self._decode(
                        number, text, lambda codec, data, n=number: decode_entry(codec, n, data)
                    )

    def _lines(self, file: gzip.GzipFile | BinaryIO) -> Iterator[bytes]:
        """Complete lines. The last may be cut off; it is left out then."""
        self.is_truncated = False
        number = 0
        while True:
            number += 1
            try:
                text = file.readline()
            except EOFError:  # in compressed files
                self.is_truncated = True
                return
            except (gzip.BadGzipFile, zlib.error) as error:
                raise BadRecording(self.path, number, f"not readable by gzip: {error}") from error
            if not text.endswith(b"\n"):
                self.is_truncated = bool(text)
                return
            yield text

    def _decode(self, number: int, text: bytes, decode: Any) -> Any:
        try:
            return decode(self._codec, json.loads(text))
        except Unreadable as error:
            raise BadRecording(self.path, number, error) from error
        except ValueError as error:  # of json, or of the text's encoding
            raise BadRecording(self.path, number, f"not JSON: {error}") from error


def _open(path: Path) -> gzip.GzipFile | BinaryIO:
    return gzip.open(path, "rb") if path.suffix == COMPRESSED else path.open("rb")
