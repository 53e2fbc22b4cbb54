"""Whether the system lets a service start its threads."""

import threading

from service_common.errors import TooFewThreads

NUM_THREADS = 16
"""Threads that a service starts before it serves, most of them gRPC's, and some more."""


def require_threads(count: int = NUM_THREADS) -> None:
    """Raise TooFewThreads unless this process can start `count` more threads; takes a millisecond.

    gRPC would try to start one of its own again and again, and never answer a call.
    """
    is_done, threads = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(count):
            thread = threading.Thread(target=is_done.wait)
            thread.start()
            threads.append(thread)
    except RuntimeError as error:
        raise TooFewThreads(len(threads), count) from error
    finally:
        is_done.set()
        for thread in threads:
            thread.join()
