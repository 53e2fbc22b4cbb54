"""Configurations and capacities that contradict themselves."""

import dataclasses
from typing import Any

import pytest

from scheduler_service.core import (
    SchedulerConfig,
)
from scheduler_service.core.config import CacheGroup, CacheLifetime
from tests.support.core_driver import make_capacity, make_driver

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs: expected 1 to 2147483647, got 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens: expected 1 to"),
        ({"watermark": 1.0}, "watermark: expected 0 to below 1"),
        ({"pipeline_depth": 0}, "pipeline_depth: expected 1 to"),
        ({"queue_retry_delay_s": 0.0}, "queue_retry_delay_s must be above 0"),
    ],
)
def test_contradictory_configuration_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]


def test_a_batch_has_no_more_sequences_than_a_step_has_tokens() -> None:
    assert SchedulerConfig(max_num_batched_tokens=128).max_num_seqs == 128
    assert SchedulerConfig(max_num_batched_tokens=512).max_num_seqs == 256
    driver = make_driver(max_num_seqs=4, max_num_batched_tokens=2)
    for number in range(4):
        driver.submit(prompt=[number] * 3, max_tokens=5)
    driver.run_until_idle()
    driver.check_empty()
    assert driver.core.snapshot().worker_groups[0].max_num_seqs == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"num_gpu_blocks": 0},
        {"cache_groups": ()},
        {"vocab_size": 0},
        {"num_cpu_blocks": -1},
        {"max_model_len": 1},
    ],
)
def test_impossible_capacities_are_refused(changes: dict[str, object]) -> None:
    [name] = changes
    with pytest.raises(ValueError, match=name):
        make_capacity(**changes)


def test_a_model_that_only_reads_sources_is_refused() -> None:
    problem = "must include one of growing, window, chunk, state, are fixed"
    with pytest.raises(ValueError, match=problem):
        make_capacity(cache_groups=(CacheGroup(lifetime=CacheLifetime.FIXED, block_tokens=4),))


def test_a_source_leaves_less_of_the_cache_and_of_a_tenants_limit_to_a_sequence() -> None:
    source = CacheGroup(lifetime=CacheLifetime.FIXED, block_tokens=8)
    capacity = make_capacity(num_gpu_blocks=10, cache_groups=(CacheGroup(block_tokens=4), source))
    lengths = [capacity.num_cache_tokens_beside(size) for size in (0, 1, 8, 9, 80, 81)]
    assert lengths == [40, 36, 36, 32, 0, -1]
    assert capacity.num_cache_tokens == 40
    assert capacity.kv_quota(9, 17) == 3 + 3
    assert make_capacity(num_gpu_blocks=10).num_cache_tokens_beside(81) == 40, "it reads no source"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, "block_tokens of a growing cache group must be at least 1, is 0"),
        ({"block_tokens": 16, "span": 8}, "span of a growing cache group must be 0, is 8"),
        (
            {"lifetime": CacheLifetime.WINDOW, "block_tokens": 16},
            "span of a window cache group must be at least 1, is 0",
        ),
        (
            {"lifetime": CacheLifetime.STATE, "block_tokens": 16, "num_blocks": 2},
            "block_tokens of a state cache group must be 0, is 16",
        ),
        (
            {"lifetime": CacheLifetime.STATE},
            "num_blocks of a state cache group must be at least 1, is 0",
        ),
    ],
)
def test_a_cache_group_has_the_numbers_of_its_lifetime(
    changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        CacheGroup(**changes)
