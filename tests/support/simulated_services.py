"""A whole deployment on this machine, as processes, with a worker that makes its tokens up."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pagewire_cli.local import LocalServices
from pagewire_cli.local.service_process import OnLine
from tools.launch import free_port


@contextmanager
def simulated_services(
    *, http: bool = False, on_line: OnLine | None = None, **flags: Any
) -> Iterator[LocalServices]:
    """Started, and ended with the block; frontends listen on free ports of this machine."""
    engine_flags = {"simulate": True, "grace_period": 1.0, "log_level": "warning"} | flags
    listen = f"127.0.0.1:{free_port()}"
    services = LocalServices(
        "simulated",
        engine_flags=engine_flags,
        listen=listen,
        http=f"127.0.0.1:{free_port()}" if http else None,
        on_line=on_line,
    )
    try:
        services.start(timeout_s=120)
        yield services
    finally:
        services.stop()


def resident_bytes(pid: int) -> int:
    """Memory that a process has, as the system counts it."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096
