"""CPU cores: the number that a worker may use, thread affinity, and how threads wait.

Nothing here imports torch, since some of it must run before torch is imported.
"""

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from worker_service.errors import InvalidOption

logger = logging.getLogger(__name__)

SPIN_COUNT = 10_000
"""Iterations in which a thread of GNU's OpenMP runtime looks for work before it sleeps: about half
a millisecond. With its default of 300,000, threads spin between two steps on cores that the
frontend, the core and this process's event loop need."""

_SETS_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CpuShare:
    """One of equal parts of a machine's cores."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `0/2`, the first of two parts. Raises InvalidOption."""
        index, _, count = text.partition("/")
        if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
            raise InvalidOption(f"cpu_share: expected INDEX/COUNT such as 0/2 or 1/2, got {text!r}")
        return cls(int(index), int(count))

    def part(self, index: int, count: int) -> "CpuShare":
        """One of `count` equal parts of this one."""
        return CpuShare(self.index * count + index, self.count * count)

    def of(self, items: Sequence[T]) -> Sequence[T]:
        """This part of a list, in its order; one element, which others use too, if there are too
        few."""
        if self.count > len(items):
            return [items[self.index % len(items)]]
        size = len(items)
        return items[self.index * size // self.count : (self.index + 1) * size // self.count]


ALL_CORES = CpuShare()


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Make OpenMP's threads sleep soon, unless the user sets it. Call it before importing torch."""
    if not any(name in environment for name in _SETS_WAITING):
        environment["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


def num_usable_cores(root: Path = Path("/sys"), share: CpuShare = ALL_CORES) -> int:
    """Physical cores that this process may run on, at most its share of the container's quota.

    Two threads on one core share its vector units, so they compute no faster than one.
    """
    quota = min(_quotas(root)) / share.count
    return max(1, math.ceil(min(len(_cores(root)), quota)))


def restrict_to(share: CpuShare, root: Path = Path("/sys")) -> None:
    """Keep this process's threads on a part of the cores that it may run on."""
    cores = _cores(root)
    if share.count > len(cores):
        message = "more workers than cores num_workers=%d num_cores=%d"
        logger.warning(message, share.count, len(cores))
    cpus = sorted(cpu for core in share.of(cores) for cpu in core)
    for thread in thread_ids():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(thread, cpus)
    logger.info("cores divided share=%d/%d cpus=%s", share.index, share.count, cpus)


def _cores(root: Path) -> list[list[int]]:
    """The CPUs of each core that this process may run on."""
    cores: dict[str, list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        cores.setdefault(_siblings(cpu, root), []).append(cpu)
    return list(cores.values())


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
        raise InvalidOption(f"cpu_affinity: expected CPUs of {allowed}, once each, got {text!r}")
    return tuple(cpus)


def thread_ids() -> set[int]:
    """The system's ids of all threads of this process."""
    return {int(name) for name in os.listdir("/proc/self/task")}


def pin(threads_to_cpus: Mapping[int, int]) -> None:
    """Pin each thread to one CPU."""
    for thread, cpu in threads_to_cpus.items():
        os.sched_setaffinity(thread, {cpu})
