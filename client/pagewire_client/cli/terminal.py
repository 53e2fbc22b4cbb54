"""Where the commands write: answers to standard output, everything else to standard error.

Colours appear only on a terminal, and text of models is never taken for markup.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

_COLOURS = ("cyan", "green", "magenta", "blue", "yellow")
_lock = threading.Lock()


def write(text: str) -> None:
    """A piece of an answer, at once and as it is."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str, style: str = "dim") -> None:
    """A line for people."""
    # Made anew each time, since standard error may be another one by now, as under pytest.
    Console(stderr=True, soft_wrap=True, highlight=False).print(Text(text, style=style))


@contextmanager
def note_if_slow(text: str, after_s: float = 3.0) -> Iterator[threading.Timer]:
    """A line for people unless the block has ended, or the timer was cancelled, in time."""
    timer = threading.Timer(after_s, note, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield timer
    finally:
        timer.cancel()


def error(text: str) -> None:
    """Why the command ends."""
    line = Text.assemble(("error: ", "bold red"), text)
    Console(stderr=True, soft_wrap=True, highlight=False).print(line)


def log_line(name: str, line: str) -> None:
    """A line of a service's log, with the service's name before it; from any thread."""
    colour = _COLOURS[sum(name.encode()) % len(_COLOURS)]
    with _lock:
        text = Text.assemble((f"{name:<10} | ", colour), line)
        Console(stderr=True, soft_wrap=True, highlight=False).print(text)
