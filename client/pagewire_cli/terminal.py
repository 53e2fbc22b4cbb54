"""Output of the commands: answers go to standard output, everything else to standard error.

Colours appear only on a terminal, and generated text is never interpreted as markup.
"""

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from pagewire_client.outputs import OutputDelta

_COLOURS = ("cyan", "green", "magenta", "blue", "yellow")
_lock = threading.Lock()


def write(text: str) -> None:
    """Write a piece of an answer unchanged, and flush."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_answer(deltas: Iterable[OutputDelta]) -> None:
    """Write an answer as it comes; the model's reasoning goes to standard error, dimmed."""
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


def note(text: str, style: str = "dim") -> None:
    """Print a line for the user."""
    # Made for each line, because standard error may have been replaced, as under pytest.
    Console(stderr=True, soft_wrap=True, highlight=False).print(Text(text, style=style))


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
    Console(stderr=True, soft_wrap=True, highlight=False).print(line)


def log_line(name: str, line: str) -> None:
    """Print a line of a service's log after the service's name. Thread-safe."""
    colour = _COLOURS[sum(name.encode()) % len(_COLOURS)]
    with _lock:
        text = Text.assemble((f"{name:<10} | ", colour), line)
        Console(stderr=True, soft_wrap=True, highlight=False).print(text)
