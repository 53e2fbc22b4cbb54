"""How far the loading of a model is, for the log, a terminal's bar, and the core; the files of it
that frontends need, before the weights are loaded.

A load has phases that follow each other, such as a download and the reading of weights, each with a
number of bytes. The thread that loads advances them; other threads read `state`.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 5.0
"""Seconds between two lines of a phase."""

_MIN_SHARE = 0.01
"""Share of a phase after which the rest of its time is estimated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadState:
    """How far a phase is."""

    phase: str = "starting"
    done_bytes: int = 0
    total_bytes: int = 0
    """0 if it is not known."""
    remaining_s: float | None = None
    """Estimated time to the phase's end; None without an estimate."""


@dataclass(frozen=True, slots=True)
class FrontendFiles:
    """The files of a model that frontends need."""

    fingerprint: str
    """Of the model."""
    contents: Mapping[str, bytes]
    """By name."""


class LoadProgress:
    """The progress of one load."""

    def __init__(
        self, *, show_bar: bool | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """show_bar: whether stderr gets a bar, None: if it is a terminal; without one, there is a
        line in the log when a phase begins, and every `LOG_INTERVAL_S` seconds."""
        self.state = LoadState()
        self.files: FrontendFiles | None = None
        """None before they are read, and where they are known with the weights only."""
        self.on_files: Callable[[], object] = lambda: None
        """Called once `files` are there, on the thread that has read them."""
        self._shows_bar = sys.stderr.isatty() if show_bar is None else show_bar
        self._clock = clock

    def publish(self, files: FrontendFiles) -> None:
        """Let frontends have files of the model that is being loaded."""
        self.files = files
        self.on_files()

    @contextmanager
    def phase(self, name: str, total_bytes: int = 0) -> Iterator["Advance"]:
        """A phase; yields the function that reports its progress. total_bytes: 0 if it is not
        known yet."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
        )
        began = logged = self._clock()
        done = 0
        self.state = LoadState(phase=name, total_bytes=total_bytes)
        logger.info("%s bytes=%s", name, total_bytes or "unknown")
        with Bar(*columns, console=Console(stderr=True), disable=not self._shows_bar) as bar:
            task = bar.add_task(name, total=total_bytes or None)

            def advance(num_bytes: int, total: int | None = None) -> None:
                nonlocal done, logged, total_bytes
                done += num_bytes
                total_bytes = total or total_bytes
                now = self._clock()
                self.state = state = _state(name, done, total_bytes, now - began)
                bar.update(task, completed=done, total=total_bytes or None)
                if now - logged >= LOG_INTERVAL_S and not self._shows_bar:
                    logged = now
                    _log(state)

            yield advance


class Advance(Protocol):
    """Reports progress within a phase."""

    def __call__(self, num_bytes: int, total: int | None = None) -> None:
        """Add finished bytes. total: a new number of all bytes of the phase."""


def _state(name: str, done: int, total: int, elapsed_s: float) -> LoadState:
    remaining = max(total - done, 0)
    is_estimated = total > 0 and done >= _MIN_SHARE * total
    estimate = elapsed_s * remaining / done if is_estimated else None
    return LoadState(phase=name, done_bytes=done, total_bytes=total, remaining_s=estimate)


def _log(state: LoadState) -> None:
    share = state.done_bytes / state.total_bytes if state.total_bytes else 0.0
    remaining = "unknown" if state.remaining_s is None else f"{state.remaining_s:.0f}"
    logger.info(
        "%s share=%.0f%% bytes=%d of=%d remaining_s=%s",
        state.phase,
        100 * share,
        state.done_bytes,
        state.total_bytes,
        remaining,
    )
