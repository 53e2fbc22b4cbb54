"""A later try at a live request takes it over; whatever the order, only one runs."""

from dataclasses import replace

import pytest

from scheduler_service.core import PolicyName, SchedulerConfig
from scheduler_service.errors import (
    DuplicateRequest,
    InvalidArgument,
    QueueFull,
    RequestTakenOver,
)
from tests.support.core_driver import CoreDriver, make_capacity
from tests.support.records import RequestRecord

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_queue_requests=1)


def make_driver(config: SchedulerConfig = CONFIG) -> CoreDriver:
    driver = CoreDriver(config)
    driver.add_worker_group(make_capacity())
    return driver


def running(driver: CoreDriver, **fields: object) -> RequestRecord:
    """A request in the middle of its answer, with a step in flight."""
    record = driver.submit(prompt=[1, 2, 3, 4, 5], max_tokens=20, **fields)  # type: ignore[arg-type]
    driver.step("g0", 6)
    driver.schedule("g0")
    driver.collect()
    return record


def test_the_later_try_goes_on_from_what_its_client_has_and_the_former_ends_with_an_error() -> None:
    driver = make_driver()
    record = running(driver, n=2)
    later = driver.try_again(record, "f1", most_received=3)
    assert isinstance(record.error, RequestTakenOver)
    assert record.error.details == {"request_id": record.request.request_id, "attempt": "1"}
    assert driver.core.snapshot().num_waiting == 1
    driver.run_until_idle()
    assert later.finished is not None, "with the tokens of an undisturbed run, as the driver checks"
    driver.check_empty()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"attempt": 0}, DuplicateRequest),
        ({"attempt": 1, "fingerprint": b"another"}, DuplicateRequest),
        ({"attempt": 1, "fingerprint": b""}, DuplicateRequest),
        ({"attempt": 1, "prompt_token_ids": []}, InvalidArgument),
    ],
)
def test_what_is_no_later_try_is_refused_and_changes_nothing(
    changes: dict[str, object], error: type[Exception]
) -> None:
    driver = make_driver()
    record = running(driver)
    other = replace(record.request, frontend_id="f1", **changes)  # type: ignore[arg-type]
    with pytest.raises(error):
        driver.core.submit(other, driver.now)
    driver.run_until_idle()
    assert record.finished is not None


def test_a_later_try_keeps_its_place_and_is_not_refused_for_a_full_queue() -> None:
    driver = make_driver(replace(CONFIG, max_num_seqs=1))
    first = driver.submit(prompt=[1], max_tokens=2)
    driver.schedule("g0")
    driver.now += 1
    waits = driver.submit(prompt=[2], max_tokens=2)
    with pytest.raises(QueueFull):
        driver.submit(prompt=[3], max_tokens=2)
    driver.now += 1
    later = driver.try_again(waits, "f1", most_received=0)
    driver.try_again(first, "f1", most_received=0)
    plans = []
    driver.on_plan = lambda _, plan: plans.append(plan)
    driver.run_until_idle()
    assert [plan.new_sequences[0].token_ids[:1] for plan in plans if plan.new_sequences] == [
        [1],
        [2],
    ]
    assert later.finished is not None


def test_one_of_two_tries_that_are_submitted_to_a_new_core_runs_whichever_comes_first() -> None:
    for order in (1, -1):
        driver = make_driver()
        former = running(driver)
        request = former.request
        later = replace(request, frontend_id="f1", handle=9, attempt=1, was_accepted=True)
        fresh = make_driver()
        errors = []
        for submitted in (request, later)[::order]:
            try:
                fresh.core.submit(submitted, fresh.now)
            except RequestTakenOver as error:
                errors.append(error)
        told = fresh.core.pop_outboxes()
        assert told["f1"].accepted == [9]
        failed = told["f0"].requests_failed if "f0" in told else []
        assert len(errors) + len(failed) == 1
        assert fresh.core.snapshot().num_waiting == 1


def test_a_request_of_an_older_frontend_keeps_its_place_at_a_new_core() -> None:
    for policy in (PolicyName.FCFS, PolicyName.PRIORITY, PolicyName.FAIR):
        driver = make_driver(replace(CONFIG, policy=policy, max_num_seqs=1, max_queue_requests=9))
        young = driver.submit(prompt=[1], max_tokens=1)
        old = replace(young.request, frontend_id="f1", request_id="old", waited_us=10**6)
        old = replace(old, was_accepted=True, prompt_token_ids=[2])
        driver.core.submit(old, driver.now)
        plan = driver.schedule("g0")
        assert plan is not None
        assert plan.new_sequences[0].token_ids == [2]


def test_a_later_try_is_not_charged_for_its_prompt_again() -> None:
    config = replace(CONFIG, policy=PolicyName.FAIR, max_num_seqs=1, max_queue_requests=9)
    driver = make_driver(config)
    record = driver.submit(prompt=[1] * 9, max_tokens=9, tenant="a")
    driver.schedule("g0")
    driver.try_again(record, "f1", most_received=0)
    driver.schedule("g0")
    (later,) = driver.core.requests.seq_groups()
    assert later.placement.is_placed
    assert driver.core._fleet.models["m"].policy.key(later)[0] == 9
