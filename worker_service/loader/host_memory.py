"""What the C library does with memory that is freed.

glibc gives a freed piece back to the system at once only if it was large, and what counts as large
grows with what a process frees, up to 32 MiB: after the first big temporary, freed weights stay
with the process. While a model is loaded that would be as much again as the model. While it runs,
to get a step's temporaries from the system every time would cost a page fault for each page.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGE_WHEN_LOADING = 1 << 20
_LARGE_WHEN_RUNNING = 32 << 20  # where glibc ends up by itself


@contextmanager
def freed_memory_returns() -> Iterator[None]:
    """Within, large pieces go back to the system when freed; at the end, all that is free does.

    Without glibc nothing happens.
    """
    libc = ctypes.CDLL(None)
    if not (hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")):
        yield
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_WHEN_LOADING)
    try:
        yield
    finally:
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_WHEN_RUNNING)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE_WHEN_RUNNING)
        libc.malloc_trim(0)
