"""What commands write where."""

import json
import logging
import os
import subprocess
import sys

import pytest

from pagewire_cli import terminal
from pagewire_client.outputs import OutputDelta


def test_a_thought_goes_to_standard_error_and_the_answer_to_standard_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts = [("I [b]wonder[/b]", ""), (".", "It"), ("", " is.")]
    deltas = [OutputDelta(index=0, token_ids=[], reasoning=r, text=text) for r, text in parts]
    terminal.write_answer(deltas)
    written = capsys.readouterr()
    assert (written.out, written.err) == ("It is.\n", "I [b]wonder[/b].\n\n")


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (
            "restarting service=worker-0 exit_code=-9 delay_s=0.2",
            {"event": "restarting", "service": "worker-0", "exit_code": -9, "delay_s": 0.2},
        ),
        ("cannot read x=1: no such file", {"event": "cannot read x=1: no such file"}),
        ("late event=3 level=warn", {"event": "late event=3 level=warn"}),
        ("at time=1.5 k=v", {"event": "at time=1.5", "k": "v"}),
        ("", {"event": ""}),
    ],
)
def test_a_log_line_is_an_object_that_loses_none_of_its_words(
    message: str, fields: dict[str, object]
) -> None:
    record = logging.LogRecord("n", logging.WARNING, "p", 1, message, None, None)
    line = json.loads(terminal._JsonFormatter().format(record))
    assert line.pop("time").endswith("Z")
    assert line == {"level": "warning", "service": "pagewire"} | fields


def test_a_full_disk_loses_a_line_and_stops_nothing() -> None:
    program = (
        "from pagewire_cli import terminal\n"
        "terminal.note('lost')\n"
        "terminal.write_json()\n"
        "terminal.error('lost')\n"
        "print('goes on')\n"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
    assert done.stdout == "goes on\n"
