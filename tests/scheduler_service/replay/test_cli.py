"""`replay` as a command."""

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
