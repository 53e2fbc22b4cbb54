"""Logging: lines as text or JSON, and a throttle for failures that repeat."""

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

_PLACEHOLDER = re.compile(r"(?:(?P<key>\w+)=)?%(?:%|[-#0 +]*\d*(?:\.\d+)?[a-zA-Z])")
_NUMBERS = (int, float, bool)


class LogLevel(StrEnum):
    """Least severity that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """For whom lines are written."""

    TEXT = "text"
    JSON = "json"


def configure_logging(level: LogLevel, log_format: LogFormat) -> None:
    """Write this process's log to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(JsonFormatter() if log_format is LogFormat.JSON else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])


class JsonFormatter(logging.Formatter):
    """One line of JSON for each record."""

    def format(self, record: logging.LogRecord) -> str:
        """The record with its values as fields; of other people's messages, the whole text."""
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
    """What comes before the first `key=`."""
    return str(record.msg).partition("=")[0].rpartition(" ")[0]


def _fields(record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
    """Keys and values of a message whose values all have keys; nothing of any other."""
    found = [m for m in _PLACEHOLDER.finditer(str(record.msg)) if not m[0].endswith("%%")]
    values = record.args if isinstance(record.args, tuple) else ()
    if len(found) != len(values) or any(match["key"] is None for match in found):
        return
    for match, value in zip(found, values, strict=True):
        yield match["key"], value if isinstance(value, _NUMBERS) else str(value)


INTERVAL_S = 30.0
"""A failure that lasts is told of this often."""


class LogThrottle:
    """Which of many failures in a row deserve a line in the log.

    The first, each that differs from the last one told, and one every `INTERVAL_S`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: str | None = None
        self._told_at = 0.0

    def is_news(self, failure: str) -> bool:
        """Whether to tell of `failure`; it counts as told then."""
        now = self._clock()
        if failure == self._told and now - self._told_at < INTERVAL_S:
            return False
        self._told, self._told_at = failure, now
        return True

    def end(self) -> None:
        """It went well: whatever fails next is news."""
        self._told = None
