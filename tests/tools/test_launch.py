"""Services as processes: what they see of us, what they say, and how they end."""

import os
import signal
import sys
from pathlib import Path

import pytest

from tools.launch import Service, environment

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


def test_a_process_ends_when_stopped_or_is_killed_when_time_is_up(tmp_path: Path) -> None:
    service = start(tmp_path, "listening")
    assert service.exit_code is None
    assert service.end(30) == -signal.SIGTERM
    assert service.leaving_s is not None
    assert start(tmp_path, "deaf", DEAF).end(0.01) == -signal.SIGKILL
