"""Children are kept alive, stopped on request, and never outlive their parent."""

import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pagewire_cli.local import service_commands
from pagewire_cli.local.service_process import ServiceProcess

STUB = "tests.support.stub_service"


class Lines:
    """What a service printed, to be waited for."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def __call__(self, name: str, line: str) -> None:
        self._lines.put((name, line))

    def next(self) -> str:
        return self._lines.get(timeout=30)[1]

    def next_pid(self) -> int:
        word, pid = self.next().split()
        assert word == "pid"
        return int(pid)


def wait_until(condition: Callable[[], bool], timeout_s: float = 60) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def run(lines: Lines) -> Iterator[Callable[..., ServiceProcess]]:
    started: list[ServiceProcess] = []

    def start(*arguments: str) -> ServiceProcess:
        service = ServiceProcess("stub", [STUB, *arguments], lines, lambda: None)
        started.append(service)
        service.start()
        return service

    yield start
    for service in started:
        service.kill()
        service.join(60)


def test_a_service_is_ended_by_sigterm(run: Callable[..., ServiceProcess], lines: Lines) -> None:
    service = run("run")
    pid = lines.next_pid()
    assert service.pid == pid
    service.terminate()
    service.join(60)
    assert is_gone(pid)
    assert service.pid is None
    assert service.failure is None


def test_a_service_that_will_not_end_is_killed(
    run: Callable[..., ServiceProcess], lines: Lines
) -> None:
    service = run("stubborn")
    pid = lines.next_pid()
    service.terminate()
    service.join(0.3)
    assert is_gone(pid)


def test_a_service_that_fails_at_its_start_is_given_up_with_its_words(
    run: Callable[..., ServiceProcess],
) -> None:
    service = run("fail")
    assert wait_until(lambda: service.failure is not None)
    assert str(service.failure) == "there is no such model"
    assert service.failure is not None
    assert service.failure.details == {"service": "stub", "exit_code": "3"}
    assert service.num_starts == 1


def test_a_service_that_ends_without_its_own_reason_says_so(
    run: Callable[..., ServiceProcess],
) -> None:
    service, crashing = run("fail"), run("environment", "no_such_module")
    assert wait_until(lambda: service.failure is not None and crashing.failure is not None)
    assert (service.gave_reason, crashing.gave_reason) == (True, False)


def test_the_last_words_are_waited_for_where_output_is_read_late() -> None:
    has_ended = threading.Event()

    def read_late(name: str, line: str) -> None:
        has_ended.wait(30)

    service = ServiceProcess("stub", [STUB, "fail"], read_late, lambda: None)
    service.start()
    assert wait_until(lambda: service.exit_code is not None)
    assert service.failure is None
    has_ended.set()
    assert wait_until(lambda: service.failure is not None)
    assert str(service.failure).endswith("there is no such model")


def test_a_service_that_had_served_is_started_again(
    run: Callable[..., ServiceProcess], lines: Lines
) -> None:
    service = run("run")
    service.restartable = True
    first = lines.next_pid()
    os.kill(first, signal.SIGKILL)
    second = lines.next_pid()
    assert second != first
    assert service.pid == second
    assert service.failure is None


def test_a_service_that_was_asked_to_end_is_started_again_at_once_without_a_warning(
    run: Callable[..., ServiceProcess], lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    service = run("graceful")
    service.restartable, service.max_failed_starts = True, 1
    for _ in range(3):
        os.kill(lines.next_pid(), signal.SIGTERM)
    lines.next_pid()
    assert service.failure is None
    restarts = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert restarts == [("INFO", "restarting service=stub exit_code=0 delay_s=0.0")] * 3


def test_a_service_that_dies_before_it_served_is_not(
    run: Callable[..., ServiceProcess], tmp_path: Path
) -> None:
    service = run("die-once", str(tmp_path / "died"))
    assert wait_until(lambda: service.failure is not None)
    assert "SIGKILL" in str(service.failure)


def test_a_service_that_dies_again_and_again_is_given_up(lines: Lines) -> None:
    failed: list[bool] = []
    service = ServiceProcess("stub", [STUB, "fail"], lines, lambda: failed.append(True))
    service.restartable = True
    service.max_failed_starts = 2
    service.start()
    assert wait_until(lambda: bool(failed))
    assert service.num_starts == 3
    assert str(service.failure) == "stub ended with exit code 3: there is no such model"
    said = [lines.next() for _ in range(5)]
    assert [line for line in said if "pid" not in line] == ["error: there is no such model"] * 2


def test_a_child_finds_the_packages_its_parent_finds(
    run: Callable[..., ServiceProcess], lines: Lines
) -> None:
    run("environment", "pagewire.v1")
    lines.next_pid()
    assert lines.next() == "import pagewire"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_children_end_with_a_parent_that_is_killed(how: signal.Signals, tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from pagewire_cli.local.service_process import ServiceProcess\n"
        f"service = ServiceProcess('stub', ['{STUB}', 'stubborn'], lambda name, line:"
        " print(line, flush=True), lambda: None)\n"
        "service.start()\n"
        "time.sleep(60)\n"
    )
    roots = os.pathsep.join(path for path in sys.path if path)
    environment = service_commands.environment() | {"PYTHONPATH": roots}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline().split()[1])
        assert not is_gone(pid)
        parent.send_signal(how)
        parent.wait(60)
        assert wait_until(lambda: is_gone(pid))
