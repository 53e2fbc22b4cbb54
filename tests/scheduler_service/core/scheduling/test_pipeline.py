"""How many steps are planned before results are in, and how many of them travel together.

A symbolic worker's decode steps take 1,000 µs.
"""

import dataclasses

import pytest

from scheduler_service.core import SchedulerConfig
from scheduler_service.core.beam_search import BeamParams, EarlyStopping
from scheduler_service.core.scheduler_stats import LatencyHistogram
from scheduler_service.core.scheduling.pipeline import MAX_HOLD_US
from tests.support.core_driver import CoreDriver, make_capacity

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, watermark=0.0)
PATIENT_US = 1_000_000


def make_driver(**changes: object) -> CoreDriver:
    driver = CoreDriver(dataclasses.replace(CONFIG, **changes))  # type: ignore[arg-type]
    driver.add_worker_group(make_capacity("g", num_gpu_blocks=64, max_model_len=128))
    return driver


def decoding(driver: CoreDriver, *max_hold_us: int, **fields: object) -> None:
    """Requests that decode, the worker's speed being known, and no step that is open."""
    for hold_us in max_hold_us:
        driver.submit(prompt=[1, 2, 3], max_tokens=100, max_hold_us=hold_us, **fields)  # type: ignore[arg-type]
    driver.step("g", 4)


def lead(driver: CoreDriver) -> list[int]:
    """Plans as far ahead as the core does; with each how many may come together."""
    together = []
    while (plan := driver.schedule("g")) is not None:
        together.append(plan.max_results)
    while driver.deliver("g"):
        pass
    return together


@pytest.mark.parametrize(
    ("max_hold_us", "config", "expected"),
    [
        pytest.param([PATIENT_US] * 2, {}, [8] * 9, id="where nobody waits, one more is open"),
        pytest.param([PATIENT_US, 0], {}, [1, 1], id="one request waits for its tokens"),
        pytest.param([PATIENT_US, 3_500], {}, [3] * 4, id="the least patient request"),
        pytest.param([PATIENT_US], {"max_results": 1}, [1, 1], id="an operator says alone"),
        pytest.param(
            [PATIENT_US],
            {"max_results": 2, "pipeline_depth": 5},
            [2] * 5,
            id="an operator plans further ahead",
        ),
    ],
)
def test_as_many_steps_travel_together_as_the_least_patient_request_allows(
    max_hold_us: list[int], config: dict[str, int], expected: list[int]
) -> None:
    driver = make_driver(**config)
    decoding(driver, *max_hold_us)
    assert lead(driver) == expected


def test_slow_steps_do_not_run_far_ahead_of_what_may_come() -> None:
    driver = make_driver(max_results=1000)
    decoding(driver, PATIENT_US)
    assert lead(driver)[0] == MAX_HOLD_US // 1000


def test_a_request_that_has_ended_is_waited_for_no_more() -> None:
    driver = make_driver()
    decoding(driver, PATIENT_US, 0)
    assert lead(driver) == [1, 1]
    driver.cancel(list(driver.records.values())[-1])
    assert lead(driver) == [8] * 9


def test_tokens_that_come_together_have_each_taken_the_time_of_a_step() -> None:
    driver = make_driver()
    decoding(driver, PATIENT_US)
    before = driver.core.snapshot().inter_token_counts
    for _ in range(4):
        driver.schedule("g")
    driver.now += 0.004
    results = driver.links["g"].results
    while results:
        held_us = 1000 * (len(results) - 1)
        driver.core.update("g", dataclasses.replace(results.popleft(), held_us=held_us), driver.now)
    expected = LatencyHistogram()
    expected.add(1000, 4)
    after = driver.core.snapshot().inter_token_counts
    assert [b - a for a, b in zip(before, after, strict=True)] == expected.counts


def test_steps_travel_alone_while_a_request_waits_or_its_prompt_is_computed() -> None:
    driver = make_driver(max_num_seqs=2)
    decoding(driver, PATIENT_US)
    driver.submit(prompt=list(range(30)), max_tokens=100, max_hold_us=PATIENT_US)
    assert lead(driver) == [1, 1], "two steps of its prompt"
    assert lead(driver) == [8] * 9
    driver.submit(prompt=[1], max_tokens=5, max_hold_us=PATIENT_US)
    assert lead(driver) == [1, 1], "it waits for a place"


def test_what_comes_while_a_prompt_is_computed_does_not_wait_behind_steps_without_it() -> None:
    driver = make_driver()
    decoding(driver, PATIENT_US)
    while driver.deliver("g"):
        pass
    driver.submit(prompt=[1, 2, 3], max_tokens=100, max_hold_us=PATIENT_US)
    plans = [driver.schedule("g"), driver.schedule("g")]
    assert all(plan is not None and plan.max_results == 1 for plan in plans)
    assert driver.schedule("g") is None
    driver.submit(prompt=[4, 5], max_tokens=100, max_hold_us=PATIENT_US)
    driver.deliver("g")
    plan = driver.schedule("g")
    assert plan is not None
    assert len(plan.new_sequences) == 1


def test_a_beam_search_waits_for_its_results() -> None:
    driver = make_driver()
    search = BeamParams(width=1, length_penalty=1.0, early_stopping=EarlyStopping.WHEN_FULL)
    decoding(driver, PATIENT_US, beam_search=search)
    assert lead(driver) == [1]
