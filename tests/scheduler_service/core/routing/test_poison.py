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
                while group_id in driver.work:
                    if (plan := driver.schedule(group_id)) is not None:
                        deadly.setdefault(group_id, []).append(kills(plan))
                if deadly.get(group_id) and deadly[group_id].pop(0):
                    self.num_deaths += 1
                    del deadly[group_id]
                    driver.lose_worker_group(group_id)
                    driver.add_worker_group(self._capacity(group_id))
                else:
                    driver.deliver(group_id)
            driver.collect()
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


@pytest.mark.parametrize(
    ("kind", "num_tokens", "place"),
    [
        ("one choice", 7, 200),
        ("three choices", 0, 0),
        ("a beam search", 0, 100),
    ],
)
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
    fleet.run(killed_by(poison, num_tokens))
    assert poison.error is not None
    assert poison.error.reason == "WORKERS_LOST"
    assert poison.error.details["num_lone_worker_losses"] == "2"
    assert fleet.num_deaths <= 4
    assert all(record.finished is not None for record in records)
    fleet.driver.check_empty()


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


@pytest.mark.parametrize(
    ("seed", "rate"),
    [
        (0, 0.02),
        (1, 0.04),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((0, 0.04), (1, 0.02))),
    ],
)
def test_kills_from_outside_fail_no_request_and_change_no_token(seed: int, rate: float) -> None:
    fleet, draw = Fleet(num_groups=2, max_num_seqs=32, max_num_batched_tokens=128), Random(seed)
    records = [
        fleet.driver.submit(prompt=[draw.randrange(32) for _ in range(20)], max_tokens=50)
        for _ in range(100)
    ]
    fleet.run(lambda _: draw.random() < rate)
    assert fleet.num_deaths >= 2
    assert all(record.finished is not None for record in records)


def test_a_preempted_request_whose_worker_dies_was_preempted_and_then_recovers() -> None:
    driver = make_driver(make_capacity(num_gpu_blocks=5), watermark=0.0, pipeline_depth=1)
    driver.submit(prompt=[1] * 7, max_tokens=9)
    last = driver.submit(prompt=[2] * 8, max_tokens=4, request_id="last")
    while driver.core.snapshot().num_preemptions == 0:
        driver.step("g0")
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
        driver.step("g0")
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


@pytest.mark.parametrize(("num_others", "num_lone"), [(0, 0), (1, 1), (2, 0)])
def test_deaths_alone_are_forgotten_unless_another_request_died_alone(
    num_others: int, num_lone: int
) -> None:
    driver = make_driver(make_capacity(), max_num_seqs=4)
    for _ in range(num_others):
        driver.submit(prompt=[1] * 4, max_tokens=9)
    driver.schedule("g0")
    waiting = driver.submit(prompt=[2] * 4, max_tokens=9)
    group = next(
        group for group in driver.core.requests.seq_groups() if group.request is waiting.request
    )
    group.losses.num_lone = 1
    driver.lose_worker_group("g0")
    assert group.losses.num_lone == num_lone
