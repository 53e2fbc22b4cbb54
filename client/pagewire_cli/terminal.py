"""Output of the commands: answers go to standard output, everything else to standard error.

Colours appear only on a terminal, and generated text is never interpreted as markup.
"""

import json
import logging
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.text import Text

from pagewire_client.outputs import CompletionOutput, OutputDelta

_COLOURS = ("cyan", "green", "magenta", "blue", "yellow")
_LINE = re.compile(r"(.*?)((?: (?!(?:time|level|event)=)\w+=\S+)*)", re.DOTALL)
"""Words, and keys with values."""
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?")
_lock = threading.Lock()


def write(text: str) -> None:
    """Write a piece of an answer unchanged, and flush."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_answer(deltas: Iterable[OutputDelta | CompletionOutput]) -> None:
    """Write an answer, as it comes or whole; reasoning goes to standard error, dimmed."""
    thinks = False
    for delta in deltas:
        if delta.reasoning:
            thinks = True
            _write_thought(delta.reasoning)
        if delta.text:
            if thinks:
                _write_thought("\n\n")
            thinks = False
            write(delta.text)
    write("\n")


def _write_thought(text: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False).print(Text(text, style="dim"), end="")


_is_json = False


def write_json() -> None:
    """From now on, every line on standard error is a JSON object, this process's log included."""
    global _is_json
    _is_json = True
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_JsonFormatter())


def note(text: str, style: str = "dim") -> None:
    """Print a line for the user."""
    _print(Text(text, style=style), {"event": text})


@contextmanager
def note_if_slow(text: str, after_s: float = 3.0) -> Iterator[threading.Timer]:
    """Print a line for the user unless the block ends, or the timer is cancelled, in time."""
    timer = threading.Timer(after_s, note, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield timer
    finally:
        timer.cancel()


def error(text: str) -> None:
    """Print why the command failed."""
    line = Text.assemble(("error: ", "bold red"), text)
    _print(line, {"level": "error", "event": text})


def log_line(name: str, line: str) -> None:
    """Print a line of a service's log, with the service's name. Thread-safe."""
    colour = _COLOURS[sum(name.encode()) % len(_COLOURS)]
    fields = _fields_of(line) | {"service": name} if _is_json else {}
    _print(Text.assemble((f"{name:<10} | ", colour), line), fields)


def _print(line: Text, fields: Mapping[str, Any]) -> None:
    """Print a line, or its fields as an object. It is lost if standard error cannot be written to,
    such as a file on a full disk: that is no reason to stop a deployment."""
    with _lock, suppress(OSError):
        if _is_json:
            sys.stderr.write(_object(fields) + "\n")
            sys.stderr.flush()
        else:
            # Made for each line, because standard error may have been replaced, as under pytest.
            Console(stderr=True, soft_wrap=True, highlight=False).print(line)


def _object(fields: Mapping[str, Any]) -> str:
    """A line of this process, as the services write theirs."""
    time = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    line = {"time": time, "level": "info", "service": "pagewire"}
    return json.dumps({**line, **fields}, ensure_ascii=False)


def _fields_of(line: str) -> dict[str, Any]:
    """A service's object; one with the text of a line that is none, as of a library."""
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    if isinstance(fields, dict):
        return fields
    return {"level": "error" if line.startswith("error: ") else "info", "event": line}


class _JsonFormatter(logging.Formatter):
    """Words, then `key=value`, as an object; other messages are kept as text."""

    def format(self, record: logging.LogRecord) -> str:
        event, tail = _LINE.fullmatch(record.getMessage()).groups()  # type: ignore[union-attr]
        values = {key: value for key, _, value in (pair.partition("=") for pair in tail.split())}
        fields = {k: json.loads(v) if _NUMBER.fullmatch(v) else v for k, v in values.items()}
        return _object(fields | {"level": record.levelname.lower(), "event": event})
