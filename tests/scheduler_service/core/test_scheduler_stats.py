"""What is counted starts at zero and adds up; stopped choices end where they were stopped."""

from dataclasses import fields

import pytest

from scheduler_service.core.request import RequestTimings
from scheduler_service.core.scheduler_stats import LatencyHistogram, ModelTotals
from scheduler_service.core.step_plan import StepPlan
from tests.support.core_driver import make_driver
from tests.support.inspections import check_inspection


@pytest.mark.parametrize("kind", [ModelTotals, RequestTimings])
def test_everything_counted_starts_at_zero(kind: type[ModelTotals | RequestTimings]) -> None:
    totals = kind()
    for field in fields(totals):
        value = getattr(totals, field.name)
        counted = sum(value.counts) if isinstance(value, LatencyHistogram) else value
        assert not counted, field.name


def test_the_work_of_plans_adds_up() -> None:
    totals = ModelTotals()
    plan = StepPlan(step_id=1, swap_out=[0, 1], swap_in=[0, 1, 2, 3], copy=[0, 1, 2, 3, 4, 5])
    for _ in range(2):
        totals.add_plan(plan, num_prefill_tokens=5)
    assert totals.num_prefill_tokens == 10
    assert (totals.num_swapped_out_blocks, totals.num_swapped_in_blocks) == (2, 4)
    assert totals.num_copied_blocks == 6


def test_drafts_add_up_in_all_and_by_their_place() -> None:
    totals, timings = ModelTotals(), RequestTimings()
    assert totals.num_accepted_by_position() == []
    for num_accepted in ([3, 1, 0], [1]):
        totals.add_drafts(4 * len(num_accepted), num_accepted)
        timings.add_drafts(4, num_accepted[0])
    assert (totals.num_draft_rows, totals.num_drafts, totals.num_accepted_drafts) == (4, 16, 5)
    assert totals.num_accepted_by_position() == [3, 1, 1]
    assert (timings.num_drafts, timings.num_accepted_drafts) == (8, 4)


def test_a_stopped_choice_has_the_tokens_before_its_stop_string_alone() -> None:
    driver = make_driver()
    record = driver.submit(prompt=[1, 2, 3], max_tokens=9)
    for _ in range(5):
        driver.schedule("g0")
        driver.deliver("g0")
        driver.collect()
    assert len(record.choices[0].tokens) > 2
    driver.stop_choice(record, 0, 2)
    driver.run_until_idle()
    [ended] = check_inspection(driver.core).ended_requests
    assert ended.num_output_tokens == 2
