"""CPU cores: the number that a worker may use, thread affinity, and how threads wait.

Nothing here imports torch, since some of it must run before torch is imported.
"""

import math
import os
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

from worker_service.errors import InvalidOption

SPIN_COUNT = 10_000
"""Iterations in which a thread of GNU's OpenMP runtime looks for work before it sleeps: about half
a millisecond. With its default of 300,000, threads spin between two steps on cores that the
frontend, the core and this process's event loop need."""

_SETS_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Make OpenMP's threads sleep soon, unless the user sets it. Call it before importing torch."""
    if not any(name in environment for name in _SETS_WAITING):
        environment["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


def num_usable_cores(root: Path = Path("/sys")) -> int:
    """Physical cores that this process may run on, at most the container's quota.

    Two threads on one core share its vector units, so they compute no faster than one.
    """
    cpus = os.sched_getaffinity(0)
    cores = {_siblings(cpu, root) for cpu in cpus}
    return max(1, math.ceil(min(len(cores), *_quotas(root))))


def _siblings(cpu: int, root: Path) -> str:
    """A name of the core that a CPU (a hardware thread) belongs to."""
    path = root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return path.read_text().strip() if path.exists() else str(cpu)


def _quotas(root: Path) -> Iterator[float]:
    """Quotas of control groups, version 2 and 1, in CPUs; infinity without a limit."""
    limit = _read(root / "fs/cgroup/cpu.max")
    yield math.inf if limit is None else _ratio(*limit)
    quota = _read(root / "fs/cgroup/cpu/cpu.cfs_quota_us")
    period = _read(root / "fs/cgroup/cpu/cpu.cfs_period_us")
    if quota is not None and period is not None:
        yield _ratio(quota[0], period[0])


def _read(path: Path) -> list[str] | None:
    return path.read_text().split() if path.exists() else None


def _ratio(quota: str, period: str) -> float:
    """A quota in CPUs; `max` and -1 mean no limit."""
    return int(quota) / int(period) if quota not in ("max", "-1") else math.inf


def parse_cpus(text: str) -> tuple[int, ...]:
    """The CPUs in a list such as `0,2-5`, in its order. Raises InvalidOption."""
    cpus: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise InvalidOption(f"cpu_affinity: expected a list such as 0,2-5, got {text!r}")
        cpus.extend(range(int(first), int(last or first) + 1))
    absent = set(cpus) - os.sched_getaffinity(0)
    if absent or not cpus or len(set(cpus)) < len(cpus):
        allowed = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        raise InvalidOption(f"cpu_affinity: expected each once of {allowed}, got {text!r}")
    return tuple(cpus)


def thread_ids() -> set[int]:
    """The system's ids of all threads of this process."""
    return {int(name) for name in os.listdir("/proc/self/task")}


def pin(threads_to_cpus: Mapping[int, int]) -> None:
    """Pin each thread to one CPU."""
    for thread, cpu in threads_to_cpus.items():
        os.sched_setaffinity(thread, {cpu})
