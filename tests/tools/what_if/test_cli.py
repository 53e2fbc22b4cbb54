"""`python -m tools.what_if`: what it prints and refuses."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from typer.testing import CliRunner, Result

from scheduler_service.core import SchedulerConfig
from tests.support.virtual import make_trace, record, script
from tools.what_if.__main__ import app
from tools.what_if.cost_model import StepSample, StepSize, fit

WhatIf: TypeAlias = Callable[..., Result]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Two tenants on a worker that takes virtual time."""
    scripts = [script(i, at=0.01 * i, tenant="ab"[i % 2], num_tokens=3 + i % 5) for i in range(20)]
    path = tmp_path / "trace.jsonl"
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32)
    path.write_text("\n".join([*record(make_trace(*scripts), config).lines, ""]))
    return path


@pytest.fixture
def what_if(monkeypatch: pytest.MonkeyPatch) -> WhatIf:
    """Runs the command; its switch for the process's log is left alone."""
    monkeypatch.setattr(logging, "disable", lambda level: None)

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(app, [*map(str, arguments)])

    return run


def test_the_recording_is_replayed_first(what_if: WhatIf, recording: Path) -> None:
    result = what_if(recording)
    assert result.exit_code == 0
    assert "requests: 20 accepted" in result.stdout
    assert "recorded, predicted" in result.stdout


def test_configurations_are_compared(what_if: WhatIf, recording: Path) -> None:
    options = ["--with", "max_num_seqs=1", "--with", "pipeline-depth=1,watermark=0"]
    result = what_if(recording, *options)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    # Once for all requests, and once for each tenant.
    for name in (
        "recorded",
        "recorded, predicted",
        "max_num_seqs=1",
        "pipeline-depth=1,watermark=0",
    ):
        assert sum(f"│ {name} " in line for line in lines) == 3
    assert "20 requests that ended well in the recording" in result.stdout
    assert "step time of g0" in result.stdout
    assert "10000 µs + 1000 µs per row + 100 µs per further prompt token" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--with", "max_num_seqs"], "'max_num_seqs': expected FIELD=VALUE"),
        (
            ["--with", "max_seqs=3"],
            "max_seqs: no such field; there are default_tenant, enable_chunked_prefill,",
        ),
        (["--with", "max_num_seqs=many"], "max_num_seqs: Input should be a valid integer"),
        (["--with", "max_num_seqs=0"], "max_num_seqs: expected 1 to 2147483647, got 0"),
        (
            ["--with", "enable_prefix_caching=2"],
            "enable_prefix_caching: Input should be",
        ),
        (
            ["--with", "preemption_mode=x"],
            "preemption_mode: Input should be 'auto', 'swap'",
        ),
        (["--with", "max_num_seqs=1,enable_chunked_prefill=false"], "with chunked prefill off"),
    ],
)
def test_what_cannot_be_compared_is_said(
    what_if: WhatIf, recording: Path, arguments: list[str], message: str
) -> None:
    result = what_if(recording, *arguments)
    assert result.exit_code == 2
    assert "error: " in result.stderr
    assert message in result.stderr


def sample(num_rows: int, num_further_tokens: int, seconds: float) -> StepSample:
    size = StepSize(num_rows=num_rows, num_further_tokens=num_further_tokens, num_moved_blocks=0)
    return StepSample(size, seconds)


def test_steps_that_were_held_up_do_not_bend_the_fit() -> None:
    steps = [
        sample(n % 16, 7 * n % 64, 0.01 + 0.001 * (n % 16) + 1e-5 * (7 * n % 64)) for n in range(99)
    ]
    held_up = [sample(16, 0, 0.5), sample(3, 9, 0.3), sample(1, 0, 0.2)]
    for samples in (steps, steps + held_up):
        model = fit(samples).model
        assert model.base == pytest.approx(0.01, rel=1e-3)
        assert model.per_row == pytest.approx(0.001, rel=1e-3)
        assert model.per_token == pytest.approx(1e-5, rel=1e-3)
