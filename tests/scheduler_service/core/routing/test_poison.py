"""Requests that were being computed when workers died: which of them fail, and which do not."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from scheduler_service.core import InspectionDetail, PolicyName, StepPlan
from scheduler_service.core.beam_search import BeamParams, EarlyStopping
from scheduler_service.core.inspection import RequestState
from tests.support.core_driver import CoreDriver, make_capacity, make_driver
from tests.support.records import RequestRecord
from tests.support.symbolic_worker import Sampling


def lose_with(driver: CoreDriver, times: int, num_steps: int = 1) -> None:
    """The group dies with steps in flight, again and again."""
    for _ in range(times):
        for _ in range(num_steps):
            driver.schedule("g0")
        driver.lose_worker_group("g0")
        driver.add_worker_group(make_capacity())
    driver.collect()


class Fleet:
    """Worker groups of which some steps kill one; it returns in the next round."""

    def __init__(self, num_groups: int = 3, **config: Any) -> None:
        self.num_deaths = 0
        self.driver = make_driver(self._capacity("g0"), **config)
        for number in range(1, num_groups):
            self.driver.add_worker_group(self._capacity(f"g{number}"))

    def _capacity(self, group_id: str) -> Any:
        return make_capacity(group_id, num_gpu_blocks=8192, max_model_len=256)

    def run(self, kills: Callable[[StepPlan], bool], max_rounds: int = 5000) -> None:
        """Run until all requests have ended; a worker dies of a step for which `kills` holds when
        it comes to it, with all that was planned since."""
        driver = self.driver
        deadly: dict[str, list[bool]] = {}
        for _ in range(max_rounds):
            for group_id in list(driver.links):
                while (plan := driver.schedule(group_id)) is not None:
                    deadly.setdefault(group_id, []).append(kills(plan))
                if deadly.get(group_id) and deadly[group_id].pop(0):
                    self.num_deaths += 1
                    del deadly[group_id]
                    driver.lose_worker_group(group_id)
                    driver.add_worker_group(self._capacity(group_id))
                else:
                    driver.deliver(group_id)
            driver.collect()
            driver.core.pop_woken()
            if not any(record.is_live for record in driver.records.values()):
                return
        raise AssertionError("requests do not end")


KINDS: dict[str, dict[str, Any]] = {
    "one choice": {},
    "three choices": {"n": 3},
    "a beam search": {
        "n": 2,
        "beam_search": BeamParams(width=3, length_penalty=1.0, early_stopping=EarlyStopping.NEVER),
    },
}


def killed_by(record: RequestRecord, num_tokens: int) -> Callable[[StepPlan], bool]:
    """Whether a step computes a request, found by its prompt, that has this many output tokens."""
    prompt = list(record.request.prompt_token_ids)
    seq_ids: set[int] = set()

    def kills(plan: StepPlan) -> bool:
        for new in plan.new_sequences:
            if list(new.token_ids[: len(prompt)]) == prompt or new.parent_seq_id in seq_ids:
                seq_ids.add(new.seq_id)
        return not seq_ids.isdisjoint(plan.seq_ids) and len(record.choices[0].tokens) >= num_tokens

    return kills


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [0, 7])
@pytest.mark.parametrize("place", [0, 100, 200])
def test_a_request_that_kills_workers_among_200_others_fails_alone_after_at_most_4_deaths(
    kind: str, num_tokens: int, place: int
) -> None:
    fleet = Fleet(max_num_seqs=96, max_num_batched_tokens=256)
    draw = Random(place)
    records = [
        fleet.driver.submit(
            prompt=[9] * 17 if k == place else [draw.randrange(9) for _ in range(1 + k % 30)],
            max_tokens=30,
            **KINDS[kind] if k == place else {},
        )
        for k in range(201)
    ]
    poison = records.pop(place)
    fleet.run(killed_by(poison, 0 if "beam" in kind else num_tokens))
    assert poison.error is not None
    assert poison.error.reason == "WORKERS_LOST"
    assert poison.error.details["num_lone_worker_losses"] == "2"
    assert fleet.num_deaths <= 4
    assert all(record.finished is not None for record in records)
    fleet.driver.check_empty()


def test_one_that_is_always_alone_fails_at_the_third_death() -> None:
    fleet = Fleet(num_groups=1)
    poison = fleet.driver.submit(prompt=[9] * 4, max_tokens=20)
    fleet.run(killed_by(poison, 3))
    assert poison.error is not None
    assert fleet.num_deaths == 3


def test_one_that_kills_at_ever_later_points_fails_too() -> None:
    fleet = Fleet()
    records = [fleet.driver.submit(prompt=[k] * 4, max_tokens=200) for k in range(10)]
    poison, last_death = records[9], -8

    def kills(plan: StepPlan) -> bool:
        nonlocal last_death
        num_tokens = len(poison.choices[0].tokens)
        is_deadly = killed(plan) and num_tokens >= last_death + 8
        last_death = num_tokens if is_deadly else last_death
        return is_deadly

    killed = killed_by(poison, 0)
    fleet.run(kills)
    assert poison.error is not None
    assert fleet.num_deaths <= 18
    assert all(record.finished is not None for record in records[:9])


def test_one_that_lost_many_workers_in_company_fails_after_about_as_many_deaths_alone() -> None:
    driver = make_driver()
    record, other = (driver.submit(prompt=[k] * 4, max_tokens=25) for k in range(2))
    for _ in range(4):
        lose_with(driver, 1)
        for _ in range(4):
            driver.schedule("g0")
            driver.deliver("g0")
    driver.cancel(other)
    lose_with(driver, 4)
    assert record.is_live
    lose_with(driver, 1)
    assert record.error is not None
    assert record.error.details == {"num_worker_losses": "9", "num_lone_worker_losses": "4"}


def test_deaths_in_company_fail_nobody_however_many_there_are() -> None:
    fleet = Fleet(num_groups=2, max_num_seqs=8)
    records = [fleet.driver.submit(prompt=[k] * 4, max_tokens=30) for k in range(12)]
    fleet.run(lambda plan: len(plan.seq_ids) > 2)
    assert fleet.num_deaths > 10
    assert all(record.finished is not None for record in records)


@pytest.mark.parametrize("rate", [0.02, 0.04])
@pytest.mark.parametrize("seed", range(4))
def test_kills_from_outside_fail_no_request_and_change_no_token(seed: int, rate: float) -> None:
    fleet, draw = Fleet(num_groups=2, max_num_seqs=32, max_num_batched_tokens=128), Random(seed)
    records = [
        fleet.driver.submit(prompt=[draw.randrange(32) for _ in range(20)], max_tokens=50)
        for _ in range(100)
    ]
    fleet.run(lambda _: draw.random() < rate)
    assert fleet.num_deaths >= 2
    assert all(record.finished is not None for record in records)


def test_what_was_not_being_computed_when_its_worker_died_has_not_lost_it() -> None:
    driver = make_driver(max_worker_losses=1)
    record = driver.submit(prompt=[1, 2, 3], max_tokens=5)
    for _ in range(3):
        driver.schedule("g0")
        driver.deliver("g0")
        driver.lose_worker_group("g0")  # between two steps
        driver.add_worker_group(make_capacity())
    driver.run_until_idle()
    assert record.finished is not None
    assert record.num_losses == 0


@pytest.mark.parametrize("again", ["core", "frontend"])
def test_losses_count_on_at_a_new_core_and_for_a_later_try(again: str) -> None:
    driver = make_driver()
    record = driver.submit(prompt=[1, 2, 3], max_tokens=5)
    lose_with(driver, 2)
    assert (record.num_losses, record.num_lone_losses) == (2, 1)
    if again == "core":
        driver.lose_core()
    else:
        record = driver.try_again(record, "f1", most_received=0)
    lose_with(driver, 1)
    assert record.error is not None
    assert record.error.reason == "WORKERS_LOST"


@pytest.mark.parametrize("again", ["core", "frontend"])
def test_deaths_alone_before_an_output_count_neither_at_a_new_core_nor_for_a_later_try(
    again: str,
) -> None:
    driver = make_driver(pipeline_depth=1)
    record = driver.submit(prompt=[1, 2, 3], max_tokens=9)
    lose_with(driver, 2)
    assert record.num_lone_losses == 1
    driver.schedule("g0")
    driver.deliver("g0")
    if again == "core":
        driver.lose_core()
    else:
        record = driver.try_again(record, "f1", most_received=9)
    lose_with(driver, 2)
    assert record.is_live
    lose_with(driver, 1)
    assert record.error is not None
    assert record.error.reason == "WORKERS_LOST"


def test_a_later_try_at_a_suspect_is_one_too() -> None:
    driver = make_driver()
    records = [driver.submit(prompt=[k] * 4, max_tokens=9) for k in range(2)]
    lose_with(driver, 2)
    again = driver.try_again(records[0], "f1", most_received=0)
    plans: list[list[int]] = []
    driver.on_plan = lambda _, plan: plans.append(list(plan.seq_ids))
    driver.run_until_idle()
    assert max(map(len, plans[:4])) == 1
    assert again.finished is not None


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
    driver = make_driver()
    records = [driver.submit(prompt=[k] * 4, max_tokens=19) for k in range(2)]
    lose_with(driver, 2)
    rows: list[int] = []
    driver.on_plan = lambda _, plan: rows.append(len(plan.seq_ids))
    driver.run_until_idle()
    assert rows[:3] == [1] * 3, "alone at first"
    assert max(rows) == 2, "then with the other"
    assert all(record.finished is not None for record in records)


def test_a_request_that_passed_the_point_of_one_death_is_not_tried_after_the_next() -> None:
    driver = make_driver()
    records = [driver.submit(prompt=[k] * 4, max_tokens=19) for k in range(2)]
    for _ in range(4):
        lose_with(driver, 1)
        for _ in range(2 + 2 * records[0].num_losses ** 2):
            driver.schedule("g0")
            driver.deliver("g0")
    rows: list[int] = []
    driver.on_plan = lambda _, plan: rows.append(len(plan.seq_ids))
    lose_with(driver, 1)
    driver.run_until_idle()
    assert rows == [] or rows[0] == 2
    assert all(record.finished is not None for record in records)


def test_no_other_step_is_in_flight_during_a_suspects_and_each_gets_every_other_step() -> None:
    driver = make_driver(pipeline_depth=3)
    suspect, other = (driver.submit(prompt=[k] * 4, max_tokens=12) for k in range(2))
    lose_with(driver, 2, num_steps=3)
    later = driver.submit(prompt=[7] * 4, max_tokens=12)
    plans: list[list[int]] = []
    driver.on_plan = lambda _, plan: plans.append(list(plan.seq_ids))
    for _ in range(4):
        assert driver.schedule("g0") is not None
        assert driver.schedule("g0") is None, "until the result is in"
        driver.deliver("g0")
    assert plans[0] == plans[2] != plans[1] == plans[3]
    assert all(len(rows) == 1 for rows in plans)
    driver.run_until_idle()
    assert max(map(len, plans)) == 3
    assert all(record.finished is not None for record in (suspect, other, later))


def test_a_suspect_that_waits_for_another_holds_up_nobody() -> None:
    driver = make_driver()
    suspects = [driver.submit(prompt=[k] * 4, max_tokens=9) for k in range(2)]
    lose_with(driver, 2)
    later = driver.submit(prompt=[7] * 4, max_tokens=9)
    plans: list[list[int]] = []
    driver.on_plan = lambda _, plan: plans.append([new.token_ids[0] for new in plan.new_sequences])
    for _ in range(2):
        driver.schedule("g0")
        driver.deliver("g0")
    assert plans == [[0], [7]], "the first suspect, and the one behind the second"
    driver.run_until_idle()
    assert all(record.finished is not None for record in [*suspects, later])


def test_suspects_go_to_worker_groups_of_their_own() -> None:
    driver = make_driver()
    suspects = [driver.submit(prompt=[k] * 4, max_tokens=9) for k in range(3)]
    lose_with(driver, 2)
    driver.add_worker_group(make_capacity("g1"))
    rows: dict[str, int] = {}
    driver.on_plan = lambda group_id, plan: rows.setdefault(group_id, len(plan.seq_ids))
    driver.schedule("g0")
    driver.schedule("g1")
    assert rows == {"g0": 1, "g1": 1}
    driver.run_until_idle()
    assert all(record.finished is not None for record in suspects)


def test_one_that_died_alone_is_tried_after_the_other_suspects() -> None:
    driver = make_driver()
    suspects = [driver.submit(prompt=[k] * 4, max_tokens=9) for k in range(3)]
    lose_with(driver, 3)
    assert [record.num_lone_losses for record in suspects] == [1, 0, 0]
    tried: list[int] = []
    driver.on_plan = lambda _, plan: tried.extend(new.token_ids[0] for new in plan.new_sequences)
    driver.run_until_idle()
    assert tried == [1, 2, 0]
    assert all(record.finished is not None for record in suspects)


def test_deaths_alone_count_from_the_last_death_that_had_another_cause() -> None:
    driver = make_driver()
    driver.add_worker_group(make_capacity("g1"))
    record = driver.submit(prompt=[1] * 4, max_tokens=9)

    def lose_alone() -> None:
        [group_id] = [name for name in ("g0", "g1") if driver.schedule(name)]
        driver.lose_worker_group(group_id)
        driver.add_worker_group(make_capacity(group_id))
        driver.collect()

    for _ in range(2):  # the first only raises suspicion
        lose_alone()
    driver.lose_worker_group("g1")  # idle
    driver.add_worker_group(make_capacity("g1"))
    lose_alone()
    assert record.is_live
    lose_alone()
    assert record.error is not None
    assert record.error.reason == "WORKERS_LOST"


def test_a_stream_of_others_does_not_keep_a_suspect_waiting_once_it_may_go() -> None:
    """It is older than what comes later, and its group keeps room for it as for anything else."""
    driver = make_driver(max_num_seqs=2)
    suspects = [driver.submit(prompt=[k] * 4, max_tokens=4) for k in range(2)]
    lose_with(driver, 2)
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


def test_one_that_takes_precedence_preempts_neither_a_suspect_nor_as_one() -> None:
    driver = make_driver(policy=PolicyName.PRIORITY, max_num_seqs=2)
    suspects = [driver.submit(prompt=[k] * 4, max_tokens=9, priority=5 * k) for k in range(2)]
    lose_with(driver, 2)
    driver.schedule("g0")
    driver.submit(prompt=[7] * 4, max_tokens=9, priority=9)
    driver.deliver("g0")
    driver.schedule("g0")
    driver.submit(prompt=[8] * 4, max_tokens=9, priority=-1)
    driver.run_until_idle()
    assert all(record.finished is not None for record in driver.records.values())
    assert suspects[0].finished is not None
    assert suspects[0].finished.preempted_us == 0
    driver.check_empty()


@pytest.mark.parametrize("kind", KINDS)
def test_a_suspect_whose_memory_runs_out_is_tried_again(kind: str) -> None:
    driver = make_driver(make_capacity(num_gpu_blocks=9, num_cpu_blocks=9), watermark=0.0)
    records = [
        driver.submit(prompt=[k] * 4, max_tokens=20, **KINDS[kind] if k else {}) for k in range(2)
    ]
    lose_with(driver, 2)
    records += [driver.submit(prompt=[7, k] * 5, max_tokens=12) for k in range(3)]
    for _ in range(300):
        driver.schedule("g0")
        driver.core.check()
        driver.deliver("g0")
        driver.collect()
    assert all(record.finished is not None for record in records)
    driver.check_empty()


def test_a_request_with_rows_in_flight_was_on_the_worker_though_it_is_preempted() -> None:
    driver = make_driver(make_capacity(num_gpu_blocks=5), watermark=0.0, pipeline_depth=3)
    records = [driver.submit(prompt=[1] * count, max_tokens=9) for count in (7, 8, 1)]
    for _ in range(3):
        driver.schedule("g0")
    assert driver.core.snapshot().num_preemptions == 1
    driver.lose_worker_group("g0")
    driver.collect()
    assert [record.num_losses for record in records] == [1, 1, 0]


def test_a_step_shared_with_a_request_that_has_ended_is_not_a_step_alone() -> None:
    driver = make_driver(pipeline_depth=1)
    record = driver.submit(prompt=[1] * 4, max_tokens=9)
    lose_with(driver, 1)
    other = driver.submit(prompt=[2] * 4, max_tokens=9, sampling=Sampling(seed=3))
    driver.schedule("g0")
    driver.cancel(other)
    driver.lose_worker_group("g0")
    driver.collect()
    assert (record.num_losses, record.num_lone_losses) == (2, 0)
