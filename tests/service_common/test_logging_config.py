import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from service_common.logging_config import JsonFormatter, StreamThreadHandler


@pytest.fixture
def formatter() -> logging.Formatter:
    return JsonFormatter()


def line(formatter: logging.Formatter, message: str, *values: object, **more: Any) -> Any:
    record = logging.LogRecord("a.b", logging.WARNING, "f.py", 1, message, values, None)
    record.__dict__.update(more)
    text = formatter.format(record)
    assert "\n" not in text
    return json.loads(text)


def test_words_are_the_event_and_values_are_fields(formatter: logging.Formatter) -> None:
    told = line(
        formatter,
        "worker link failed group_id=%s epoch=%d retry_in_s=%g share=%.2f reason=%s",
        "g 0",
        3,
        0.5,
        0.25,
        ValueError('a "quoted" reason=x'),
        created=0.5,
    )
    assert told == {
        "time": "1970-01-01T00:00:00.500000Z",
        "level": "warning",
        "logger": "a.b",
        "event": "worker link failed",
        "group_id": "g 0",
        "epoch": 3,
        "retry_in_s": 0.5,
        "share": 0.25,
        "reason": 'a "quoted" reason=x',
    }


@pytest.mark.parametrize(
    ("message", "values", "event"),
    [
        ("no values", (), "no values"),
        ("%s of another library took %d %%", ("x=1", 3), "x=1 of another library took 3 %"),
        ("half=%d of %d", (1, 2), "half=1 of 2"),
        ("a mapping %(a)s", ({"a": 1},), "a mapping 1"),
    ],
)
def test_other_messages_are_events_as_a_whole(
    formatter: logging.Formatter, message: str, values: tuple[object, ...], event: str
) -> None:
    told = line(formatter, message, *values)
    assert told["event"] == event
    assert set(told) == {"time", "level", "logger", "event"}


def test_lists_and_none_are_those_of_json(formatter: logging.Formatter) -> None:
    told = line(
        formatter, "served models=%s shape=%s group=%s", ["a", "b"], (2, ValueError("x")), None
    )
    assert told["models"] == ["a", "b"]
    assert told["shape"] == [2, "x"]
    assert told["group"] is None


def test_numbers_that_json_does_not_have_are_texts(formatter: logging.Formatter) -> None:
    record = logging.LogRecord(
        "a", logging.INFO, "f.py", 1, "a=%g b=%s", (float("inf"), [-1e999]), None
    )

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    told = json.loads(formatter.format(record), parse_constant=refuse)
    assert (told["a"], told["b"]) == ("inf", ["-inf"])


def test_a_field_never_takes_the_place_of_what_every_line_has(
    formatter: logging.Formatter,
) -> None:
    told = line(formatter, "odd level=%s event=%s", "mine", "mine")
    assert (told["level"], told["event"]) == ("warning", "odd")


def test_an_exception_is_one_field(formatter: logging.Formatter) -> None:
    try:
        raise ValueError("on\ntwo lines")
    except ValueError:
        told = line(formatter, "request failed request_id=%s", "r", exc_info=sys.exc_info())
    assert told["request_id"] == "r"
    assert told["exception"].endswith("ValueError: on\ntwo lines")


def say(handler: logging.Handler, text: str, *values: object) -> None:
    """Log a line."""
    handler.handle(logging.LogRecord("a.b", logging.INFO, "f.py", 1, text, values, None))


def read_all(pipe: int) -> str:
    """What is in a pipe until its writers have closed it."""
    with os.fdopen(pipe, "rb") as file:
        return file.read().decode()


def test_an_unread_pipe_blocks_nobody_and_what_is_dropped_is_counted() -> None:
    reader, writer = os.pipe()
    handler = StreamThreadHandler(writer, max_lines=100)
    num_lines = 5_000
    began = time.monotonic()
    for number in range(num_lines):
        say(handler, "line number=%d text=%s", number, 100 * "x")
    handler.flush()
    assert time.monotonic() - began < 10, "nobody reads, and nothing waited"
    reading = threading.Thread(target=lambda: lines.extend(read_all(reader).splitlines()))
    lines: list[str] = []
    reading.start()
    handler.flush()
    say(handler, "the last")
    handler.close()
    os.close(writer)
    reading.join(60)
    told = [line for line in lines if "dropped" in line]
    num_dropped = sum(int(line.rpartition("=")[2]) for line in told)
    assert num_dropped > 0
    assert lines[0].startswith("line number=0 ")
    assert lines[-1] == "the last"
    assert len(lines) - len(told) + num_dropped == num_lines + 1


def test_lines_are_written_in_order_before_the_handler_is_closed() -> None:
    reader, writer = os.pipe()
    handler = StreamThreadHandler(writer)
    for number in range(200):
        say(handler, "%d", number)
    handler.close()
    os.close(writer)
    assert read_all(reader).split() == [str(number) for number in range(200)]


def test_no_line_is_lost_in_a_full_pipe_that_does_not_block() -> None:
    """As one that is shared with a process that has made it so."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"\n" * select.PIPE_BUF)
    handler = StreamThreadHandler(writer)
    say(handler, "a line")
    handler.flush()
    lines: list[str] = []
    reading = threading.Thread(target=lambda: lines.extend(read_all(reader).split("\n")))
    reading.start()
    handler.close()
    os.close(writer)
    reading.join(60)
    assert [line for line in lines if line] == ["a line"]


SERVICE = """
import logging, sys, time
from service_common.logging_config import LogFormat, LogLevel, configure_logging
configure_logging(LogLevel.INFO, LogFormat.TEXT)
for number in range(100_000):
    logging.getLogger("a").info("line number=%d", number)
print("served", flush=True)
"""


def test_a_process_serves_and_ends_while_nobody_reads_its_stderr() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVICE],
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"served\n"
    assert process.wait(30) == 0
    process.communicate()
