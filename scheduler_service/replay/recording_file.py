"""A recording's file while it is written: a thread of its own, so that no disk holds up a step."""

import gzip
import itertools
import logging
import os
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 0.5
"""The most that is lost when the process is killed."""

MAX_BACKLOG_CHARS = 64 * 2**20
"""Lines that wait for the disk; beyond this the disk is too slow, and the recording ends."""

COMPRESSED = ".gz"
"""A file whose name ends so is compressed."""

GZIP_LEVEL = 3
"""Token ids are nearly as small as with the greatest, in a fraction of the time."""


class CannotRecord(Exception):
    """The file cannot be made."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"cannot record to {path}: {why}")


class Output:
    """Takes lines and writes them soon. An error ends the recording, and nothing else."""

    def __init__(self, path: Path) -> None:
        """Make the file, readable by its owner alone. If it is there, the next free name is taken:
        `trace.2.jsonl` for `trace.jsonl`. Raises CannotRecord."""
        self.path, self._file = _create(path)
        self._sink: BinaryIO | gzip.GzipFile = self._file
        if path.suffix == COMPRESSED:
            self._sink = gzip.GzipFile(fileobj=self._file, mode="wb", compresslevel=GZIP_LEVEL)
        self.is_open = True
        """Whether lines still count; False for good after an error."""
        self._lines: deque[str] = deque()
        # Each number has one writer, so neither needs a lock.
        self._num_taken = 0
        self._num_written = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()
        logger.info("recording path=%s", self.path)

    def write(self, line: str) -> None:
        """Take a line, without its end; never blocks."""
        if not self.is_open:
            return
        self._num_taken += len(line)
        if self._num_taken - self._num_written > MAX_BACKLOG_CHARS:
            self.fail("the disk is too slow")
            return
        self._lines.append(line)

    def fail(self, why: object) -> None:
        """End the recording where it is: what follows a gap could not be replayed."""
        if self.is_open:
            self.is_open = False
            logger.error("recording ended early path=%s reason=%s", self.path, why)

    def close(self) -> None:
        """Write what has been taken, and close the file."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing.wait(FLUSH_INTERVAL_S):
                self._write_out()
            self._write_out()
        except OSError as error:
            self.fail(error)
        finally:
            self._lines.clear()
            for file in (self._sink, self._file):
                with suppress(OSError):
                    file.close()

    def _write_out(self) -> None:
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        if lines:
            self._sink.write("\n".join([*lines, ""]).encode())
            self._sink.flush()
            self._num_written += sum(map(len, lines))


def _create(path: Path) -> tuple[Path, BinaryIO]:
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
