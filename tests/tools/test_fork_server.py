"""Forked services are what processes started by themselves are."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.fork_server import ForkServer
from tests.support.waiting import wait_until
from tools import launch
from tools.launch import start_process


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("scheduler", "--help"), 0),
        (("scheduler", "--listen", "unix:missing/core.sock"), 1),
        (("scheduler", "--what"), 2),
    ],
)
def test_they_say_the_same_and_end_with_the_same_code(
    server: ForkServer, tmp_path: Path, words: tuple[str, ...], code: int
) -> None:
    command = launch.module("scheduler_service", *words)
    said = []
    for number, start in enumerate((server.start, start_process)):
        path = tmp_path / str(number)
        with path.open("ab") as output:
            process = start(command, output, {}, tmp_path)
        assert process.wait(60) == process.poll() == process.returncode == code
        said.append(path.read_text())
    assert said[0] == said[1] != ""


def test_they_get_variables_a_folder_and_signals(server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = launch.scheduler("unix:core.sock")
    with log.open("ab") as output:
        process = server.start(command, output, {"PAGEWIRE_LOG_FORMAT": "json"}, tmp_path)
        wait_until(lambda: "listening" in log.read_text(), "it listens")
        assert (tmp_path / "core.sock").exists()
        assert json.loads(log.read_text().splitlines()[0])["level"] == "info"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        assert process.poll() is None
        process.kill()
        assert process.wait(60) == process.returncode == -signal.SIGKILL
        process.terminate()  # does nothing, as it has ended


def test_what_their_path_customizes_runs_first_in_them(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('first', flush=True)")
    path = os.pathsep.join([str(tmp_path), launch.environment()["PYTHONPATH"]])
    command, log = launch.module("scheduler_service", "scheduler", "--what"), tmp_path / "log"
    for variables in ({"PYTHONPATH": path}, {}):
        with log.open("wb") as output:
            assert server.start(command, output, variables, tmp_path).wait(60) == 2
        assert log.read_text().startswith("first\n") == bool(variables)


def test_the_server_ends_with_its_user(tmp_path: Path) -> None:
    with (tmp_path / "log").open("ab") as output, ForkServer() as server:
        process = server.start(launch.scheduler("unix:core.sock"), output, {}, tmp_path)
        parent = psutil.Process(process.pid).parent()
        process.kill()
        process.wait(60)
    assert parent is not None
    assert parent.pid != os.getpid()
    assert not parent.is_running()
