"""How far a load is: its phases, its estimates, and its lines in the log."""

import logging

import pytest

from tests.support.clocks import Clock
from worker_service.load_progress import LOG_INTERVAL_S, LoadProgress, LoadState


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def progress(clock: Clock) -> LoadProgress:
    return LoadProgress(show_bar=False, clock=clock)


def test_the_rest_of_a_phase_takes_as_long_a_byte_as_what_is_done(
    progress: LoadProgress, clock: Clock
) -> None:
    assert progress.state == LoadState()
    with progress.phase("loading weights", 1000) as advance:
        assert progress.state == LoadState(phase="loading weights", total_bytes=1000)
        clock.now += 2
        advance(250)
        assert progress.state.remaining_s == pytest.approx(6)
        clock.now += 1
        advance(750)
        assert progress.state == LoadState(
            phase="loading weights", done_bytes=1000, total_bytes=1000, remaining_s=0
        )


def test_there_is_no_estimate_before_a_hundredth_is_done(
    progress: LoadProgress, clock: Clock
) -> None:
    with progress.phase("loading weights", 1000) as advance:
        clock.now += 1
        advance(9)
        assert progress.state.remaining_s is None
        advance(1)
        assert progress.state.remaining_s == pytest.approx(99)


def test_a_total_may_become_known_later(progress: LoadProgress, clock: Clock) -> None:
    with progress.phase("downloading") as advance:
        clock.now += 1
        advance(10)
        assert (progress.state.total_bytes, progress.state.remaining_s) == (0, None)
        advance(10, 40)
        assert (progress.state.total_bytes, progress.state.remaining_s) == (40, pytest.approx(1))


def test_a_line_is_logged_at_the_start_and_every_few_seconds(
    progress: LoadProgress, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with progress.phase("loading weights", 1000) as advance:
        for _ in range(10):
            clock.now += LOG_INTERVAL_S / 4
            advance(100)
    assert caplog.messages == [
        "loading weights bytes=1000",
        "loading weights share=40% bytes=400 of=1000 remaining_s=8",
        "loading weights share=80% bytes=800 of=1000 remaining_s=2",
    ]


def test_a_bar_takes_the_place_of_the_lines(
    clock: Clock, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    with LoadProgress(show_bar=True, clock=clock).phase("loading weights", 10) as advance:
        clock.now += 2 * LOG_INTERVAL_S
        advance(10)
    assert caplog.messages == ["loading weights bytes=10"]
    assert "loading weights" in capsys.readouterr().err
