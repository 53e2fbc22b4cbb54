"""Services as processes: what they see of us, what they say, and how they end."""

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.cluster import end_all
from tools.launch import Service, environment, module

DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def start(folder: Path, name: str, first: str = "pass") -> Service:
    """A process that waits for a signal; it does when this returns."""
    is_up = folder / f"{name}.fifo"
    os.mkfifo(is_up)
    program = f"import signal; {first}; open({str(is_up)!r}, 'w').close(); signal.pause()"
    service = Service(name, [sys.executable, "-c", program], folder / f"{name}.log")
    is_up.open().close()
    return service


def test_a_process_finds_our_packages_and_none_of_our_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEWIRE_MODEL", "ours")
    assert "PAGEWIRE_MODEL" not in environment()
    program = (
        "import os, sys, pagewire_client; print(os.environ.get('PAGEWIRE_MODEL')); sys.exit(3)"
    )
    variables = {"PAGEWIRE_MODEL": "its"}
    service = Service("one", [sys.executable, "-c", program], tmp_path / "one.log", variables)
    assert service.wait() == service.exit_code == 3
    assert service.log == "its\n"


def test_a_process_finds_the_packages_that_its_parent_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried = tmp_path / "packages"
    carried.mkdir()
    (carried / "carried.py").write_text("print('found')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"packages{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    logs = tmp_path / "logs"
    logs.mkdir()
    service = Service("one", [sys.executable, "-c", "import carried"], logs / "one.log")
    assert (service.wait(), service.log) == (0, "found\n")


def test_what_successors_say_is_added_to_one_log(tmp_path: Path) -> None:
    for _ in range(2):
        service = Service("help", module("conformance", "--help"), tmp_path / "help.log")
        assert service.wait() == 0
    assert service.log.count("--help") >= 2


def test_a_process_ends_when_stopped_or_is_killed_when_time_is_up(tmp_path: Path) -> None:
    service = start(tmp_path, "listening")
    assert service.exit_code is None
    assert service.end(30) == -signal.SIGTERM
    assert service.leaving_s is not None
    assert start(tmp_path, "deaf", DEAF).end(0.01) == -signal.SIGKILL


def test_all_are_stopped_once_and_none_is_left(tmp_path: Path) -> None:
    counts = "signal.signal(signal.SIGTERM, lambda *_: (print('received', flush=True), 1 / 0))"
    services = [start(tmp_path, "counts", counts), start(tmp_path, "plain")]
    end_all(services, 60)
    assert [service.exit_code for service in services] == [1, -signal.SIGTERM]
    assert services[0].log.count("received") == 1
