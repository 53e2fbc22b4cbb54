"""Configurations and capacities that contradict themselves."""

import dataclasses

import pytest

from scheduler_service.core import (
    SchedulerConfig,
)
from tests.support.core_driver import make_capacity

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens must be at least 4"),
        ({"watermark": 1.0}, "watermark must be in"),
        ({"pipeline_depth": 0}, "pipeline_depth must be at least 1"),
        ({"queue_retry_delay_s": 0.0}, "queue_retry_delay_s must be above 0"),
    ],
)
def test_contradictory_configuration_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_gpu_blocks": 0},
        {"block_size": 0},
        {"vocab_size": 0},
        {"num_cpu_blocks": -1},
        {"max_model_len": 1},
    ],
)
def test_impossible_capacities_are_refused(changes: dict[str, object]) -> None:
    [name] = changes
    with pytest.raises(ValueError, match=name):
        make_capacity(**changes)
