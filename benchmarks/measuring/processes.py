"""Process trees: signals, processor time and memory; the processes of a benchmark."""

import asyncio
import contextlib
import multiprocessing
import signal
import sys
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil


def tree(pid: int) -> list[psutil.Process]:
    """A process and its descendants; empty if it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process and its descendants."""
    for process in tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def exit_on_sigterm() -> None:
    """Make SIGTERM raise SystemExit, so that all engines are ended, even stopped ones. A further
    one, which `timeout` sends to the group of a process, does not interrupt that."""

    def end(number: int, _: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


def processor_seconds(pid: int) -> float:
    """Processor time of a process and its descendants, those included that have been waited for."""
    total = 0.0
    for process in tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    return total


def resident_bytes(pid: int) -> int:
    """Memory of a process and its descendants; shared pages count once.

    The sum of their proportional set sizes, in which a page that n processes map counts 1/n in
    each.
    """
    return sum(_proportional_bytes(process.pid) for process in tree(pid))


def _proportional_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):  # it has ended
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


Role = Callable[..., Coroutine[Any, Any, None]]
"""A coroutine function that takes one end of a pipe, and more arguments."""


class Processes:
    """The roles of one run, each in a process of its own with a pipe to it."""

    def __init__(self) -> None:
        self._all: dict[Connection, BaseProcess] = {}

    def start(self, role: Role, *arguments: object) -> Connection:
        """Run a coroutine function with one end of a pipe in a process; the other end."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_run, args=(role, theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        self._all[ours] = process
        return ours

    def receive(self, pipe: Connection) -> Any:
        """The next message; raises RuntimeError if one of the processes fails instead."""
        while not pipe.poll(0.1):
            if any(process.exitcode for process in self._all.values()):
                self.kill()
                raise RuntimeError("a process of the benchmark has failed")
        return pipe.recv()

    def join(self) -> None:
        """Wait until all have ended."""
        for pipe, process in self._all.items():
            process.join()
            pipe.close()

    def kill(self) -> None:
        """End all at once."""
        for process in self._all.values():
            process.kill()
        self.join()


def _run(role: Role, *arguments: object) -> None:
    asyncio.run(role(*arguments))
