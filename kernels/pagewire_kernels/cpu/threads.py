"""Running one kernel on several threads.

torch's own OpenMP threads are used if it has any: a second pool would compete with them, since
OpenMP threads spin for a while after each operation of torch. `GOMP_parallel` is the entry point of
`#pragma omp parallel` in GNU's OpenMP runtime, which LLVM's and Intel's runtimes provide, too.
"""

import ctypes
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)


class Kernel(Protocol):
    """A function that every thread of a team calls with the same task."""

    address: int
    call: Any
    """Called with the address of the task."""


Team = Callable[[Kernel, int, int], None]
"""Calls a kernel with the address of a task on up to a number of threads, and waits for all."""


class NotRecordable(Exception):
    """An operation that cannot be part of a recorded program."""


class _Local(threading.local):
    is_recording = False


local = _Local()
"""`is_recording`: whether this thread is recording a program, so that kernels must not run."""


_SERIAL_NUMBERS = 1 << 14


def count_for(work: int, serial: int = _SERIAL_NUMBERS) -> int:
    """The number of threads for some work: one if it is at most `serial`, as it would end before
    others have woken up. work: by default the numbers that are computed."""
    return torch.get_num_threads() if work > serial else 1


def run(kernel: Kernel, task: int, num_threads: int) -> None:
    """Run `kernel` on up to `num_threads` threads, including the calling one.

    task: its address. Raises NotRecordable while this thread records a program.
    """
    if local.is_recording:
        raise NotRecordable("a kernel that cannot be recorded")
    if num_threads == 1:
        kernel.call(task)
    else:
        _team()(kernel, task, num_threads)


@cache
def _team() -> Team:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        parallel = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        logger.info("kernels run on threads of their own: torch has no OpenMP runtime to share")
        return ThreadPool(torch.get_num_threads()).run
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None

    def run_openmp(kernel: Kernel, task: int, num_threads: int) -> None:
        parallel(kernel.address, task, num_threads, 0)

    return run_openmp


class ThreadPool:
    """A pool of Python threads; a kernel called through ctypes does not hold the GIL."""

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, "pagewire-kernel")

    def run(self, kernel: Kernel, task: int, num_threads: int) -> None:
        """Call the kernel on `num_threads` threads, including this one, and wait for all."""
        others = [self._pool.submit(kernel.call, task) for _ in range(num_threads - 1)]
        kernel.call(task)
        for other in others:
            other.result()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
