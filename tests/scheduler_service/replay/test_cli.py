"""`replay` as a command."""

import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scheduler_service.__main__ import make_app
from scheduler_service.core import SchedulerConfig
from tests.support.virtual import make_trace, record, script


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_recording_is_replayed_and_a_changed_one_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_changed: bool
) -> None:
    monkeypatch.setattr(logging, "disable", lambda level: None)
    recording = record(make_trace(*(script(i, num_tokens=3) for i in range(20))), SchedulerConfig())
    if is_changed:
        index = recording.find("submit", bool)
        recording.change(index, lambda data: data["request"].update(prompt_token_ids=[1]))
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([*recording.lines, ""]))
    result = CliRunner().invoke(make_app(), ["replay", str(path)])
    assert result.exit_code == int(is_changed), result.output
    if is_changed:
        assert "first difference: schedule" in result.stdout
    else:
        assert "requests: 20 accepted" in result.stdout
        assert "notice" not in result.stdout
