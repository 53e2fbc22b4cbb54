"""How many connections a frontend accepts, and what it logs where the system allows no more."""

import errno
import logging
import sys

import pytest

from scheduler_service.frontend.cli import OWN_FILES, connections_within
from scheduler_service.frontend.http.server import _AcceptFailures


@pytest.mark.parametrize(
    ("max_files", "limit"), [(1 << 20, 1000), (OWN_FILES + 200, 200), (OWN_FILES, 1)]
)
def test_connections_leave_room_for_the_frontends_own_files(max_files: int, limit: int) -> None:
    assert connections_within(max_files, 1000) == limit


def test_failures_to_accept_are_logged_once_and_as_a_line() -> None:
    failures = _AcceptFailures()

    def record(message: str) -> logging.LogRecord:
        try:
            raise OSError(errno.EMFILE, "Too many open files")
        except OSError:
            info = sys.exc_info()
        return logging.LogRecord("asyncio", logging.ERROR, "", 0, message, (), info)

    first, again = (record("socket.accept() out of system resource\nsocket: …") for _ in range(2))
    assert failures.filter(first)
    assert not failures.filter(again)
    assert first.getMessage().startswith("no connection can be accepted reason=[Errno 24] Too many")
    assert first.exc_info is None
    other = record("Task exception was never retrieved")
    assert failures.filter(other)
    assert other.exc_info is not None
