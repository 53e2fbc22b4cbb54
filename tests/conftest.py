"""What all tests share."""

import atexit
import gc
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec

import pytest

# OpenMP threads otherwise spin for about 15 ms after an operator of torch: with small tensors, most
# of the CPU time of a test, which other processes lack. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from pagewire_kernels.cpu import build

# A shell starts commands in the background with SIGINT ignored, nohup with SIGHUP, and processes
# inherit that: tests that interrupt a command would wait for an end that never comes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# No test depends on how fast the machine is.
with suppress(ModuleNotFoundError):  # those for a GPU need no Hypothesis
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse kernels of other sources: they are not used, and hundreds of tests would fail."""
    if hasattr(config, "workerinput") or not build.SOURCES.exists():
        return
    digest = build.digest().encode()
    if any(digest not in path.read_bytes() for path in build.LIBRARIES.glob("*.so")):
        script = build.SOURCES.with_name("build.py")
        pytest.exit(f"the compiled CPU kernels are older than their sources: run {script}", 4)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector from examining modules and tests, a million objects that all live
    to the end, while they are made and in later collections."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # bindings report objects that are left at the end


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files of tests that may take ten minutes: a test of a minute that begins last
    occupies one process while the others have nothing left."""

    def may_take_minutes(item: pytest.Item) -> bool:
        timeout = item.get_closest_marker("timeout")
        return timeout is not None and timeout.args[0] >= 600

    first = {item.path for item in items if may_take_minutes(item)}
    items.sort(key=lambda item: item.path not in first)


@pytest.fixture(scope="session", autouse=True)
def _services_are_forked() -> Iterator[None]:
    if not find_spec("grpc"):  # tests for a GPU run without the services' dependencies
        yield
        return
    from tests.support.fork_server import ForkServer
    from tools.launch import Service

    with ForkServer() as server:
        Service.starter = server.start
        yield
