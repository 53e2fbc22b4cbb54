"""Runs of the harness, each made once."""

import asyncio
from pathlib import Path

import pytest

from tests.chaos.config import ChaosConfig
from tests.chaos.report import Report
from tests.chaos.run import run_chaos
from tests.chaos.timeline import Timeline


def run_to_end(config: ChaosConfig, folder: Path) -> Report:
    """A run, which prints how to run it again if there are faults."""
    timeline = Timeline()
    try:
        report = asyncio.run(run_chaos(config, folder, timeline))
    except BaseException:
        print(timeline)
        raise
    if report.faults:
        print(f"{config}\n{timeline}\nlogs: {folder}")
    return report


@pytest.fixture(scope="session")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Report:
    config = ChaosConfig(
        num_workers=2,
        num_embedders=2,
        num_kills=6,
        num_streams=12,
        num_asks=12,
        num_texts=40,
        max_open_streams=6,
        mean_pause_s=0.2,
        lease_s=2.0,  # which many disturbances outlast
    )
    return run_to_end(config, tmp_path_factory.mktemp("chaos"))
