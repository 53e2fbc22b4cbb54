"""Leaks of a run: memory, open files and threads of processes, requests and blocks."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pagewire_cli.local.service_process import ServiceProcess
from pagewire_client import Client
from pagewire_client.deployment import EngineStatus
from tests.fuzz.outcome import Outcome
from tests.support.simulated_services import resident_bytes

SETTLE_S = 30.0
"""Time for interrupted calls and their connections to end."""
MAX_MORE_BYTES = 32 << 20
"""Growth of resident memory since the warm-up that allocators and bounded caches explain."""
MAX_MORE_FILES = 8
MAX_MORE_THREADS = 8


@dataclass(frozen=True)
class Footprint:
    """Resources of one process."""

    resident_bytes: int
    num_files: int
    num_threads: int

    @classmethod
    def of(cls, process: ServiceProcess) -> "Footprint":
        """The current resources; zero for a process that does not exist."""
        pid = process.pid
        if pid is None:
            return cls(0, 0, 0)
        folders = (f"/proc/{pid}/fd", f"/proc/{pid}/task")
        return cls(resident_bytes(pid), *(len(os.listdir(folder)) for folder in folders))

    def exceeds(self, before: "Footprint") -> bool:
        """Whether more is held than noise accounts for."""
        return (
            self.resident_bytes > before.resident_bytes + MAX_MORE_BYTES
            or self.num_files > before.num_files + MAX_MORE_FILES
            or self.num_threads > before.num_threads + MAX_MORE_THREADS
        )

    def __str__(self) -> str:
        return (
            f"{self.resident_bytes >> 20} MiB, {self.num_files} files, {self.num_threads} threads"
        )


@dataclass
class Growth:
    """Of each process after the warm-up and in the end."""

    processes: Sequence[ServiceProcess]
    before: dict[str, Footprint]
    after: dict[str, Footprint]

    @classmethod
    def since_now(cls, processes: Sequence[ServiceProcess]) -> "Growth":
        """Store the current resources for later comparison."""
        now = {process.name: Footprint.of(process) for process in processes}
        return cls(processes, now, now)

    def settle(self, outcome: Outcome) -> None:
        """Poll until nothing has grown or the time is up; report what has."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            self.after = {process.name: Footprint.of(process) for process in self.processes}
            grown = [name for name, now in self.after.items() if now.exceeds(self.before[name])]
            if not grown or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        for name in grown:
            outcome.blame(f"{name} has grown: {self.before[name]} -> {self.after[name]}")

    def __str__(self) -> str:
        return "\n".join(
            f"  {name}: {before} -> {self.after[name]}" for name, before in self.before.items()
        )


def blame_what_is_open(client: Client, outcome: Outcome) -> None:
    """Wait until no requests and no used blocks are left."""
    deadline = time.monotonic() + SETTLE_S
    while (left := _open(client.get_status(timeout=60))) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        outcome.blame(f"after the run there are {left}")


def _open(status: EngineStatus) -> str:
    """The requests and blocks in use; empty if there are none."""
    counts = {
        "running": status.num_running,
        "waiting": status.num_waiting,
        "swapped": status.num_swapped,
    }
    for group in status.groups:
        counts[f"device blocks of {group.group_id}"] = (
            group.num_gpu_blocks - group.num_free_gpu_blocks
        )
        counts[f"host blocks of {group.group_id}"] = (
            group.num_cpu_blocks - group.num_free_cpu_blocks
        )
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)
