"""How a service's process ends, and how its flags are read."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from service_common.config_flags import begin_log, misspelt_variables, parse_count
from service_common.logging_config import LogFormat, LogLevel

PROGRAM = """
import atexit, sys, threading
from service_common.config_flags import run_to_exit

class Endless:
    def __del__(self):
        print("freed at the interpreter's own end")

endless = Endless()
atexit.register(print, "exit handler")
print("command")
run_to_exit(lambda: {command})
"""


@pytest.mark.parametrize(
    ("command", "code"), [("None", 0), ("sys.exit(3)", 3), ("sys.exit('why')", 1), ("1 / 0", 1)]
)
def test_a_process_ends_with_its_commands_code_and_calls_exit_handlers(
    command: str, code: int
) -> None:
    program = PROGRAM.replace("{command}", command)
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert ended.returncode == code
    lines = ["command", "exit handler"]
    if command in ("None", "sys.exit(3)"):
        assert ended.stdout.splitlines() == lines
    else:  # as Python ends it, after saying why on stderr
        assert ended.stdout.splitlines()[:2] == lines
        assert ("why" if "why" in command else "ZeroDivisionError") in ended.stderr


LATE_SIGNAL = """
import asyncio, os, signal
from service_common.config_flags import run_service

async def serve():
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.{name}, ended.set)
    os.kill(os.getpid(), signal.{name})
    await ended.wait()
    return "served"

print(run_service(serve()))
os.kill(os.getpid(), signal.{name})
print("ended by itself")
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_after_a_services_end_leaves_the_exit_code_alone(name: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LATE_SIGNAL.format(name=name)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stdout.splitlines() == ["served", "ended by itself"]
    assert ended.returncode == 0


@pytest.mark.parametrize(
    ("text", "count"),
    [
        *(("8192", 8192), (8192, 8192), (" 8k ", 8000), ("8K", 8192), ("1M", 2**20)),
        *(("1m", 10**6), ("25.6k", 25_600), ("0.5m", 500_000), ("2g", 2 * 10**9)),
        *(("1.1k", 1100), ("1T", 2**40), ("0", 0)),
    ],
)
def test_counts_are_read_as_vllm_reads_them(text: str | int, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "k", "8kb", "1.5K", "1.5", "-1", "auto", "1e4", "8 k"])
def test_no_other_text_is_a_count(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected a whole number, such as 8192, 8k"):
        parse_count(text)


LOG_FLAGS = {"log_level": LogLevel.INFO, "log_format": LogFormat.TEXT}


def test_misspelt_variables_are_warned_of_with_what_was_meant(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PAGEWIRE_MAX_STEPMS", "100")
    monkeypatch.setenv("PAGEWIRE_MAX_NUM_SEQ", "4")
    monkeypatch.setenv("PAGEWIRE_MAX_NUM_SEQS", "8")
    monkeypatch.setenv("PAGEWIRE_SOMETHING_ELSE", "1")
    begin_log({**LOG_FLAGS, "max_step_ms": 250, "max_num_seqs": 8})
    assert [record.getMessage() for record in caplog.records] == [
        "PAGEWIRE_MAX_STEPMS has no effect: did you mean PAGEWIRE_MAX_STEP_MS?"
    ]


def test_no_variable_of_one_service_looks_like_a_misspelling_to_another() -> None:
    reference = Path(__file__).parents[2] / "docs/reference/command-line.md"
    sections = re.split(r"^## pagewire ", reference.read_text(), flags=re.MULTILINE)[1:]
    variables = {text.split()[0]: set(re.findall(r"PAGEWIRE_[A-Z_]+", text)) for text in sections}
    everything = set().union(*variables.values())
    for service in ("frontend", "scheduler", "worker"):
        some = variables[service]
        flags = [name.removeprefix("PAGEWIRE_").lower() for name in some]
        assert len(flags) > 20
        for name in everything - some:
            assert not misspelt_variables([name], flags)


INTERRUPTED = """
import os, signal
from service_common.config_flags import run_service

signal.signal(signal.SIGINT, {handler})

async def serve():
    os.kill(os.getpid(), signal.SIGINT)
    print("went on")

run_service(serve())
"""


@pytest.mark.parametrize(
    ("handler", "output"), [("signal.default_int_handler", ""), ("signal.SIG_IGN", "went on\n")]
)
def test_ctrl_c_interrupts_a_service_that_does_not_handle_signals_yet(
    handler: str, output: str
) -> None:
    program = INTERRUPTED.replace("{handler}", handler)
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert ended.stdout == output
    assert ("KeyboardInterrupt" in ended.stderr) == (output == "")
