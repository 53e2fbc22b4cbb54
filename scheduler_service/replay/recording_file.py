"""Writes recordings to files, on a thread, and reads them."""

import gzip
import itertools
import logging
import os
import threading
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from scheduler_service.errors import CannotRecord
from scheduler_service.replay import recording

logger = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 0.5
"""Seconds of recording lost at most when the process is killed."""

MAX_BACKLOG_CHARS = 64 * 2**20
"""Characters that may wait for the disk; beyond this the recording ends."""

COMPRESSED = ".gz"
"""Suffix of compressed files."""

GZIP_LEVEL = 3
"""Compresses token ids nearly as well as the highest level, in a fraction of the time."""


class RecordingWriter:
    """Writes lines to a file on a thread of its own. An error ends the recording, nothing else."""

    def __init__(self, path: Path, max_backlog_chars: int = MAX_BACKLOG_CHARS) -> None:
        """Create the file, readable by its owner only. If it exists, the next free name is used:
        `trace.2.jsonl` for `trace.jsonl`. Raises CannotRecord."""
        self._max_backlog_chars = max_backlog_chars
        self.path, self._file = _create(path)
        self._sink: BinaryIO | gzip.GzipFile = self._file
        if path.suffix == COMPRESSED:
            self._sink = gzip.GzipFile(fileobj=self._file, mode="wb", compresslevel=GZIP_LEVEL)
        self.is_open = True
        """Whether lines are still written; False after an error."""
        self._lines: deque[str] = deque()
        # Each number has one writer, so neither needs a lock.
        self._num_queued = 0
        self._num_written = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()
        logger.info("recording path=%s", self.path)

    def write(self, line: str) -> None:
        """Queue a line, without its newline; never blocks."""
        if not self.is_open:
            return
        self._num_queued += len(line)
        if self._num_queued - self._num_written > self._max_backlog_chars:
            self.fail("the disk is too slow")
            return
        self._lines.append(line)

    def fail(self, reason: object) -> None:
        """End the recording here: inputs after a gap could not be replayed."""
        if self.is_open:
            self.is_open = False
            logger.error("recording ended early path=%s reason=%s", self.path, reason)

    def close(self) -> None:
        """Write all queued lines, and close the file."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing.wait(FLUSH_INTERVAL_S):
                self._write_pending()
            self._write_pending()
        except OSError as error:
            self.fail(error)
        finally:
            self._lines.clear()
            for file in (self._sink, self._file):
                with suppress(OSError):
                    file.close()

    def _write_pending(self) -> None:
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        if lines:
            self._sink.write("\n".join([*lines, ""]).encode())
            self._sink.flush()
            self._num_written += sum(map(len, lines))


def _create(path: Path) -> tuple[Path, BinaryIO]:
    if path.is_dir():
        raise CannotRecord(path, "it is a directory; expected the name of a file")
    for number in itertools.count(1):
        candidate = _numbered(path, number)
        try:
            descriptor = os.open(candidate, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            raise CannotRecord(path, error.strerror or str(error)) from error
        return candidate, open(descriptor, "wb")
    raise AssertionError("counting does not end")


def _numbered(path: Path, number: int) -> Path:
    """`trace.2.jsonl.gz` for `trace.jsonl.gz`; the first has no number."""
    if number == 1:
        return path
    plain = path.with_suffix("") if path.suffix == COMPRESSED else path
    return path.with_name(f"{plain.stem}.{number}{path.name.removeprefix(plain.stem)}")


class BadRecording(Exception):
    """The file is not a recording that this software can read; names the line."""

    def __init__(self, path: Path, line: int, reason: object) -> None:
        super().__init__(f"{path}, line {line}: {reason}")


class RecordingReader:
    """A recording's header, and its entries, read on demand."""

    def __init__(self, path: Path) -> None:
        """Read the header; raises BadRecording and OSError."""
        self.path = path
        self.is_truncated = False
        """Whether the file ends within a line, as when the core was killed; known at the end."""
        with _open(path) as file:
            lines = self._lines(file)
            first = next(lines, None)
            if first is None:
                raise BadRecording(path, 1, "expected a header, the file ends before it")
            with self._naming_line(1):
                self.header: recording.Header = recording.decode_header(first)

    def entries(self) -> Iterator[recording.Entry]:
        """All inputs, from the first; raises BadRecording at an invalid line."""
        with _open(self.path) as file:
            for number, text in enumerate(self._lines(file), start=1):
                if number > 1:
                    with self._naming_line(number):
                        entry = recording.decode_entry(number, text)
                    yield entry

    def _lines(self, file: gzip.GzipFile | BinaryIO) -> Iterator[bytes]:
        """Complete lines; a last line that is cut off is left out."""
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

    @contextmanager
    def _naming_line(self, number: int) -> Iterator[None]:
        try:
            yield
        except recording.Unreadable as error:
            raise BadRecording(self.path, number, error) from error


def _open(path: Path) -> gzip.GzipFile | BinaryIO:
    return gzip.open(path, "rb") if path.suffix == COMPRESSED else path.open("rb")
