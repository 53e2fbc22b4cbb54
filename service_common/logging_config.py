"""Logging: lines as text or JSON, written by a thread, and a throttle for failures that repeat."""

import json
import logging
import os
import queue
import re
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from enum import StrEnum
from io import UnsupportedOperation
from math import isfinite
from typing import Any

_PLACEHOLDER = re.compile(r"(?:(?P<key>\w+)=)?%(?:%|[-#0 +]*\d*(?:\.\d+)?[a-zA-Z])")
_NUMBERS = (int, float, bool)


class LogLevel(StrEnum):
    """Lowest severity that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """Text for people, JSON for programs."""

    TEXT = "text"
    JSON = "json"


def configure_logging(level: LogLevel, log_format: LogFormat) -> None:
    """Write this process's log to stderr, without ever waiting for its reader."""
    handler = _stderr_handler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(JsonFormatter() if log_format is LogFormat.JSON else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if level is LogLevel.INFO:  # the client of the Hugging Face hub logs each HTTP request
        for name in ("httpx", "httpx2"):
            logging.getLogger(name).setLevel(logging.WARNING)


def _stderr_handler() -> logging.Handler:
    try:
        return StreamThreadHandler(sys.stderr.fileno())
    except UnsupportedOperation:  # a stream in memory, which never blocks
        return logging.StreamHandler()


MAX_LINES = 10_000
"""Lines that may wait to be written: what a busy service writes in a minute."""

FLUSH_S = 1.0
"""How long the end of a process waits for a reader that is slow."""


class StreamThreadHandler(logging.Handler):
    """Writes lines to a file descriptor on a thread.

    While the reader of a pipe is slow, lines wait; beyond `max_lines` they are dropped, and their
    number is logged once there is room again. The descriptor is written to directly: a thread that
    is blocked in `sys.stderr` would hold its lock at the interpreter's end.
    """

    def __init__(self, descriptor: int, max_lines: int = MAX_LINES) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: queue.Queue[str | None] = queue.Queue(max_lines)
        self._num_dropped = 0
        self._counting = threading.Lock()
        """The handler's own lock does not serve: it is held while `flush` waits for the thread."""
        self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record's line, or drop it."""
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            with self._counting:
                self._num_dropped += 1
        except Exception:  # as handlers of the standard library: logging never fails its caller
            self.handleError(record)

    def flush(self) -> None:
        """Wait until all lines have been written, but not longer than `FLUSH_S`."""
        give_up_at = time.monotonic() + FLUSH_S
        while self._lines.unfinished_tasks and time.monotonic() < give_up_at:
            time.sleep(0.001)

    def close(self) -> None:
        """Write what is left, within `FLUSH_S`, and end the thread."""
        self.flush()
        with suppress(queue.Full):
            self._lines.put_nowait(None)
            self._thread.join(FLUSH_S)
        super().close()

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            with suppress(OSError):  # the reader has closed the pipe
                self._write(line)
                self._write_dropped()
            self._lines.task_done()
        self._lines.task_done()

    def _write_dropped(self) -> None:
        with self._counting:
            num_dropped, self._num_dropped = self._num_dropped, 0
        if num_dropped:
            text = "log lines dropped, as stderr was not read num_lines=%d"
            level, name = logging.WARNING, __name__
            record = logging.LogRecord(name, level, __file__, 0, text, (num_dropped,), None)
            self._write(self.format(record))

    def _write(self, line: str) -> None:
        data = f"{line}\n".encode(errors="backslashreplace")
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # a process that shares the pipe has made it non-blocking
                room = select.poll()
                room.register(self._descriptor, select.POLLOUT)
                room.poll()


class JsonFormatter(logging.Formatter):
    """One line of JSON for each record."""

    def format(self, record: logging.LogRecord) -> str:
        """The record with its values as fields; messages of other libraries are kept as text."""
        when = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": when.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = dict(_fields(record))
        line["event"] = _words(record) if fields else record.getMessage()
        line |= {key: value for key, value in fields.items() if key not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _words(record: logging.LogRecord) -> str:
    """The part before the first `key=`."""
    return str(record.msg).partition("=")[0].rpartition(" ")[0]


def _fields(record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
    """Keys and values of a message whose values all have keys; empty for any other."""
    found = [m for m in _PLACEHOLDER.finditer(str(record.msg)) if not m[0].endswith("%%")]
    values = record.args if isinstance(record.args, tuple) else ()
    if len(found) != len(values) or any(match["key"] is None for match in found):
        return
    for match, value in zip(found, values, strict=True):
        yield match["key"], _json_value(value)


def _json_value(value: object) -> object:
    if isinstance(value, float) and not isfinite(value):
        return str(value)  # JSON has no such numbers
    if value is None or isinstance(value, _NUMBERS):
        return value
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    return str(value)


FIRST_INTERVAL_S, INTERVAL_S = 5.0, 30.0
"""Intervals at which a lasting failure is logged again, the first time and from then on. Services
that start together wait for each other less than the first."""


class LogThrottle:
    """Decides which of consecutive failures are logged.

    The first, each that differs from the last one logged, one after `FIRST_INTERVAL_S`, and from
    then on one every `INTERVAL_S`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._interval_s = FIRST_INTERVAL_S
        self._is_first = True
        self._logged: str | None = None
        self._logged_at = 0.0

    def should_log(self, failure: str) -> bool:
        """Whether to log `failure`; if so, it counts as logged."""
        now = self._clock()
        is_repeated = failure == self._logged
        if is_repeated and now - self._logged_at < self._interval_s:
            return False
        self._interval_s = INTERVAL_S if is_repeated else FIRST_INTERVAL_S
        self._logged, self._logged_at = failure, now
        return True

    def level(self, failure: str, *, may_start: bool) -> int | None:
        """The level at which to log that a peer cannot be reached: INFO the first time if it may
        still be starting, else WARNING; None: not now."""
        if not self.should_log(failure):
            return None
        is_first, self._is_first = self._is_first, False
        return logging.INFO if is_first and may_start else logging.WARNING

    def end(self) -> None:
        """Record a success: the next failure is logged."""
        self._logged, self._is_first = None, False
