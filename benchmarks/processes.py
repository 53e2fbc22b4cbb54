"""Trees of processes: their signals, their processor time, their memory."""

import contextlib
import signal
import socket
import sys
from pathlib import Path

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


def end_in_order_when_told() -> None:
    """Make SIGTERM raise SystemExit, so that it leaves no engine behind, not even a stopped one."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def processor_seconds(pid: int) -> float:
    """Processor time of a process and its descendants, those included that have been waited for."""
    total = 0.0
    for process in tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    return total


def resident_bytes(pid: int) -> int:
    """Memory that a process and its descendants hold, what several share counted once.

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


def free_port() -> int:
    """A TCP port on this machine that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
