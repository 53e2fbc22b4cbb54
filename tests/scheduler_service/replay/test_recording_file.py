"""A recording's file: written by a thread, read back, and what may be wrong with it."""

import gzip
import logging
import stat
from pathlib import Path

import pytest

from scheduler_service.core import SchedulerConfig, SchedulerCore, WorkerGroupCapacity
from scheduler_service.errors import CannotRecord
from scheduler_service.replay.exact_replay import ExactReplay
from scheduler_service.replay.recorder import RecordingCore
from scheduler_service.replay.recording import INPUTS
from scheduler_service.replay.recording_file import BadRecording, RecordingReader, RecordingWriter
from tests.support.core_driver import make_capacity


def record(path: Path, capacity: WorkerGroupCapacity | None = None, **limits: int) -> RecordingCore:
    core = RecordingCore(SchedulerConfig(), RecordingWriter(path, **limits))
    core.add_worker_group(capacity or make_capacity(), 1.0)
    core.schedule("g0", 2.0)
    core.expire(3.5)
    return core


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_what_is_recorded_is_read_back(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    record(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    reader = RecordingReader(path)
    assert reader.header.config == SchedulerConfig()
    assert [(entry.line, entry.do, entry.now) for entry in reader.entries()] == [
        (2, "add_worker_group", 1.0),
        (3, "schedule", 2.0),
        (4, "expire", 3.5),
    ]
    assert not reader.is_truncated
    summary = ExactReplay(reader.header).run(reader.entries())
    assert summary.is_exact
    assert (summary.num_inputs, summary.seconds) == (3, 2.5)


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.jsonl", "a.jsonl", "b.tar.jsonl.gz", "b.tar.jsonl.gz", "c", "c"):
        RecordingWriter(tmp_path / name).close()
    names = ["a.2.jsonl", "a.3.jsonl", "a.jsonl", "b.tar.2.jsonl.gz", "b.tar.jsonl.gz", "c", "c.2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_file_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "a.jsonl"
    with pytest.raises(CannotRecord, match=f"record: {tmp_path}: it is a directory"):
        RecordingWriter(tmp_path)
    with pytest.raises(CannotRecord, match=f"record: {path}: No such file or directory"):
        RecordingWriter(path)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_file_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    record(path).close()
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        try:
            reader = RecordingReader(path)
        except BadRecording as error:
            begins = length == 1 and path.suffix == ".gz"  # gzip's mark of two bytes
            message = "not readable by gzip" if begins else "the file ends before it"
            assert message in str(error)  # noqa: PT017
            continue
        entries = list(reader.entries())
        assert len(entries) <= 3
        # Only between two lines is there nothing to see of it.
        assert reader.is_truncated or data[:length].endswith(b"\n")
    assert len(entries) >= 2


def test_lines_are_in_the_file_soon_without_a_close(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    core = record(path)
    for _ in range(100):
        if len(gzip_text(path)) > 3:
            break
        core._lines._thread.join(0.1)
    assert len(gzip_text(path)) == 4
    core.close()


def gzip_text(path: Path) -> list[bytes]:
    """The complete lines so far."""
    lines = []
    try:
        with gzip.open(path) as file:
            lines.extend(file)
    except EOFError:
        pass
    return lines


@pytest.mark.parametrize(
    ("number", "line", "message"),
    [
        (1, b"[]", "not a recording"),
        (1, b'{"format":"pagewire recording","format_version":2}', "version 2 is unknown"),
        (1, b'{"format":"pagewire recording"}', "format version None is unknown"),
        (2, b"{", "Invalid JSON: EOF"),
        (2, b"\xff", "Invalid JSON: "),
        (3, b'{"do":"explode"}', "'explode' found using 'do' does not match any"),
        (3, b'{"do":"schedule","now":1.0}', "schedule.worker_group_id: Field required"),
        (
            4,
            b'{"do":"expire","now":1.0,"why":1}',
            "expire.why: Unexpected keyword argument",
        ),
        (4, b'{"do":"expire","now":"1"}', "expire.now: Input should be a valid number, got '1'"),
    ],
)
def test_a_line_that_is_wrong_is_named(
    tmp_path: Path, number: int, line: bytes, message: str
) -> None:
    path = tmp_path / "trace.jsonl"
    record(path).close()
    lines = path.read_bytes().splitlines()
    lines[number - 1] = line
    path.write_bytes(b"\n".join([*lines, b""]))
    with pytest.raises(BadRecording) as caught:
        list(RecordingReader(path).entries())
    assert f"{path}, line {number}: " in str(caught.value)
    assert message in str(caught.value)


def test_a_file_that_is_not_compressed_does_not_pass_for_one_that_is(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_text("{}\n")
    with pytest.raises(BadRecording, match="line 1: not readable by gzip"):
        RecordingReader(path)


def test_a_disk_that_is_too_slow_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    core = record(tmp_path / "trace.jsonl", max_backlog_chars=800)
    for i in range(20):
        core.expire(4.0 + i)
    core.close()
    errors = [entry.message for entry in caplog.records if entry.levelno == logging.ERROR]
    assert errors == [
        f"recording ended early path={tmp_path}/trace.jsonl reason=the disk is too slow"
    ]
    assert list(RecordingReader(tmp_path / "trace.jsonl").entries()) == []


def test_an_input_that_cannot_be_recorded_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    core = record(tmp_path / "trace.jsonl")
    core.expire(object())  # type: ignore[arg-type]
    core.expire(4.0)
    core.close()
    assert "recording ended early" in caplog.text
    assert len(list(RecordingReader(tmp_path / "trace.jsonl").entries())) == 3


def test_a_recording_core_is_a_core_that_records_its_inputs() -> None:
    assert issubclass(RecordingCore, SchedulerCore)
    public = {name for name in vars(RecordingCore) if not name.startswith("_")}
    assert public == {*INPUTS, "close"}
