"""The clock of a worker's timings."""

import time


def monotonic_us() -> int:
    """The worker's monotonic clock, in microseconds."""
    return time.monotonic_ns() // 1000
