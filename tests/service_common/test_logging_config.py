import json
import logging
import sys
from typing import Any

import pytest

from service_common.logging_config import JsonFormatter


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
