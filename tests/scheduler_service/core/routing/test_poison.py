"""Requests that were being computed when a worker died: who is to blame, and who is not."""

import pytest

from scheduler_service.core import InspectionDetail
from scheduler_service.core.stats.inspection import RequestState
from tests.support.core_driver import CoreDriver, make_capacity, make_driver


def lose_with(driver: CoreDriver, times: int) -> None:
    """The group dies with a step in flight, again and again."""
    for _ in range(times):
        driver.schedule("g0")
        driver.lose_worker_group("g0")
        driver.add_worker_group(make_capacity())
    driver.collect()


def test_what_was_not_being_computed_when_its_worker_died_is_not_to_blame() -> None:
    driver = make_driver(max_worker_losses=1)
    record = driver.submit(prompt=[1, 2, 3], max_tokens=5)
    driver.schedule("g0")
    driver.deliver("g0")
    driver.lose_worker_group("g0")  # between two steps
    driver.add_worker_group(make_capacity())
    driver.run_until_idle()
    assert record.finished is not None


@pytest.mark.parametrize("again", ["core", "frontend"])
def test_losses_count_on_at_a_new_core_and_for_a_later_try(again: str) -> None:
    driver = make_driver()
    record = driver.submit(prompt=[1, 2, 3], max_tokens=5)
    lose_with(driver, 2)
    assert record.num_losses == 2
    if again == "core":
        driver.lose_core()
    else:
        record = driver.try_again(record, "f1", most_received=0)
    lose_with(driver, 1)
    assert record.error is not None
    assert record.error.reason == "WORKERS_LOST"


@pytest.mark.parametrize("place", range(4))
def test_one_that_kills_its_workers_does_not_take_its_neighbours_along(place: int) -> None:
    """Wherever it stands among them: those before it are past the point when it is tried."""
    driver = make_driver()
    records = [driver.submit(prompt=[9 if k == place else k] * 4, max_tokens=20) for k in range(4)]
    poison = records.pop(place)
    for _ in range(60):
        plan = driver.schedule("g0")
        live = poison.is_live and plan is not None
        if live and [9] * 4 in [list(new.token_ids) for new in plan.new_sequences]:  # type: ignore[union-attr]
            driver.lose_worker_group("g0")
            driver.add_worker_group(make_capacity())
            driver.collect()
        else:
            driver.deliver("g0")
    driver.run_until_idle()
    assert poison.error is not None
    assert poison.error.reason == "WORKERS_LOST"
    assert all(record.finished is not None for record in records)
    assert [record.num_losses for record in records] == [2, 2, 2]


def test_a_preempted_request_whose_worker_dies_was_preempted_and_then_recovers() -> None:
    driver = make_driver(make_capacity(num_gpu_blocks=5), watermark=0.0, pipeline_depth=1)
    driver.submit(prompt=[1] * 7, max_tokens=9)
    last = driver.submit(prompt=[2] * 8, max_tokens=4, request_id="last")
    while driver.core.snapshot().num_preemptions == 0:
        driver.schedule("g0")
        driver.deliver("g0")
    driver.now += 0.25
    driver.lose_worker_group("g0")
    requests = driver.core.inspect(InspectionDetail(include_requests=True)).requests
    assert {request.state for request in requests} == {RequestState.RECOVERING}
    driver.now += 0.5
    driver.add_worker_group(make_capacity("g1"))
    driver.run_until_idle()
    assert last.finished is not None
    assert 250_000 <= last.finished.preempted_us < 260_000
    assert 500_000 <= last.finished.recovery_us < 510_000


def test_one_that_came_further_than_it_was_is_no_suspect_any_more() -> None:
    driver = make_driver(max_worker_losses=2)
    records = [driver.submit(prompt=[k] * 4, max_tokens=19) for k in range(2)]
    lose_with(driver, 1)
    rows = []
    driver.on_plan = lambda _, plan: rows.append(len(plan.seq_ids))
    driver.run_until_idle()
    assert rows[0] == 1, "alone at first"
    assert max(rows) == 2, "then beside the other"
    assert all(record.finished is not None for record in records)


def test_a_suspect_that_waits_for_another_holds_up_nobody() -> None:
    driver = make_driver(max_worker_losses=2)
    suspects = [driver.submit(prompt=[k] * 4, max_tokens=9) for k in range(2)]
    lose_with(driver, 1)
    later = driver.submit(prompt=[7] * 4, max_tokens=9)
    plans = []
    driver.on_plan = lambda _, plan: plans.append([new.token_ids[0] for new in plan.new_sequences])
    driver.schedule("g0")
    assert plans == [[0, 7]], "the first suspect, and the one behind the second"
    driver.run_until_idle()
    assert [0, 7] in plans
    assert any(1 in new for new in plans[1:])
    assert all(record.finished is not None for record in [*suspects, later])


def test_suspects_go_to_worker_groups_of_their_own() -> None:
    driver = make_driver(max_worker_losses=2)
    suspects = [driver.submit(prompt=[k] * 4, max_tokens=9) for k in range(3)]
    lose_with(driver, 1)
    driver.add_worker_group(make_capacity("g1"))
    rows: dict[str, int] = {}
    driver.on_plan = lambda group_id, plan: rows.setdefault(group_id, len(plan.seq_ids))
    driver.schedule("g0")
    driver.schedule("g1")
    assert rows == {"g0": 1, "g1": 1}
    driver.run_until_idle()
    assert all(record.finished is not None for record in suspects)


def test_a_stream_of_others_does_not_keep_a_suspect_waiting_once_it_may_go() -> None:
    """It is older than what comes later, and its group keeps room for it as for anything else."""
    driver = make_driver(max_worker_losses=2, max_num_seqs=2)
    suspects = [driver.submit(prompt=[k] * 4, max_tokens=4) for k in range(2)]
    lose_with(driver, 1)
    others = []
    for _ in range(60):
        if suspects[1].finished is not None:
            break
        others.append(driver.submit(prompt=[9] * 4, max_tokens=4))
        driver.schedule("g0")
        driver.deliver("g0")
        driver.collect()
    assert suspects[1].finished is not None
    assert any(record.is_live for record in others), "they were there all the time"
    driver.run_until_idle()


def test_a_request_with_rows_in_flight_was_on_the_worker_though_it_is_preempted() -> None:
    driver = make_driver(
        make_capacity(num_gpu_blocks=5), watermark=0.0, pipeline_depth=3, max_worker_losses=1
    )
    records = [driver.submit(prompt=[1] * count, max_tokens=9) for count in (7, 8, 1)]
    for _ in range(3):
        driver.schedule("g0")
    assert driver.core.snapshot().num_preemptions == 1
    driver.lose_worker_group("g0")
    driver.collect()
    errors = [record.error.reason if record.error else None for record in records]
    assert errors == ["WORKERS_LOST", "WORKERS_LOST", None]
