"""`replay` as a command."""

import json
import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scheduler_service.__main__ import make_app
from scheduler_service.core import SchedulerConfig
from tests.support.virtual import make_trace, record, script


def test_a_recording_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "disable", lambda level: None)
    recording = record(make_trace(*(script(i, num_tokens=3) for i in range(20))), SchedulerConfig())
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([*recording.lines, ""]))
    result = CliRunner().invoke(make_app(), ["replay", str(path)])
    assert result.exit_code == 0, result.output
    assert "requests: 20 accepted" in result.stdout
    assert "notice" not in result.stdout
    assert "configuration" not in result.stdout


def test_the_replay_of_a_former_format_names_the_version_and_its_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "disable", lambda level: None)
    recording = record(make_trace(script(0, num_tokens=3)), SchedulerConfig())
    header = json.loads(recording.lines[0]) | {"format_version": 2}
    del header["config"]["lets_equals_overtake"]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([json.dumps(header), *recording.lines[1:], ""]))
    result = CliRunner().invoke(make_app(), ["replay", str(path)])
    assert result.exit_code == 0, result.output
    assert "notice:   cores that wrote format version 2 let a request preempt" in result.stdout
