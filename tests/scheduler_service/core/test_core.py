"""What the scenarios do not show of the core: failing rows, mismatches, timings, bounds."""

import pytest

from scheduler_service.core import (
    ResultMismatch,
    RowError,
    RowPromptLogprobs,
    SchedulerCore,
    StepResult,
)
from scheduler_service.core.admission.request_registry import RequestRegistry
from scheduler_service.core.scheduling.results import deliver_prompt_logprobs
from scheduler_service.errors import UnknownRequest
from tests.support.core_driver import SMALL_CONFIG, make_capacity, make_driver, make_request
from tests.support.symbolic_worker import Sampling


def test_aborting_an_unknown_request_is_an_error_and_cancelling_one_is_not() -> None:
    core = SchedulerCore(SMALL_CONFIG)
    with pytest.raises(UnknownRequest):
        core.abort("", "r1", 0.0)
    core.cancel("f0", 1, 0.0)
    core.stop_choice("f0", 1, 3, 0.0)
    core.remove_frontend("f0", 0.0)
    core.remove_worker_group("g0", 0.0)
    assert core.pop_outboxes() == {}


def test_prompt_logprobs_that_overlap_are_cut_to_what_is_new() -> None:
    core = SchedulerCore(SMALL_CONFIG)
    core.submit(make_request(), 0.0)
    group = core.requests.seq_groups()[0]

    def update(start: int, count: int) -> RowPromptLogprobs:
        positions = range(start, start + count)
        matrix = b"".join(bytes([p, 0, 0, 0, 100 + p, 0, 0, 0]) for p in positions)
        ranks = b"".join(bytes([p, 0, 0, 0]) for p in positions)
        return RowPromptLogprobs(
            start=start, width=2, token_ids=matrix, logprobs=matrix, ranks=ranks
        )

    for part in (update(1, 2), update(1, 1), update(2, 3), update(1, 4)):
        deliver_prompt_logprobs(group, part)
    told = core.pop_outboxes()["f0"].prompt_logprobs
    assert told == [(1, update(1, 2)), (1, update(3, 2))]


def test_a_row_that_fails_ends_its_request_and_no_other() -> None:
    driver = make_driver()
    sampling = Sampling(seed=1, fails_at=1)
    broken = driver.submit(prompt=[1, 2], max_tokens=4, n=2, sampling=sampling)
    sound = driver.submit(prompt=[1, 2], max_tokens=4)
    driver.run_until_idle()
    assert broken.error is not None
    assert broken.error.reason == "NON_FINITE_LOGITS"
    assert sound.finished is not None
    driver.check_empty()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (StepResult(step_id=2, token_ids=[1]), "expected step_id=1"),
        (StepResult(step_id=1, token_ids=[]), "expected 1 tokens"),
        (StepResult(step_id=1, token_ids=[32]), "not below 32"),
        (StepResult(step_id=1, token_ids=[-1]), "neither a token nor an error"),
        (
            StepResult(
                step_id=1, token_ids=[1], errors={1: RowError(reason="NO_CANDIDATES", message="")}
            ),
            "beyond the 1 of the batch",
        ),
    ],
)
def test_a_result_that_does_not_answer_the_open_plan_changes_nothing(
    result: StepResult, message: str
) -> None:
    driver = make_driver()
    record = driver.submit(prompt=[1, 2], max_tokens=2)
    driver.schedule("g0")
    with pytest.raises(ResultMismatch, match=message):
        driver.core.update("g0", result, driver.now)
    driver.run_until_idle()
    assert record.finished is not None


def test_a_result_without_an_open_plan_is_a_mismatch() -> None:
    with pytest.raises(ResultMismatch, match="no step is open"):
        make_driver().core.update("g0", StepResult(step_id=1, token_ids=[]), 0.0)


def test_a_group_id_is_not_taken_twice() -> None:
    core = make_driver().core
    with pytest.raises(ValueError, match="g0 already exists"):
        core.add_worker_group(make_capacity(), 0.0)


def test_the_next_deadline_is_that_of_the_live_request_that_is_due_first() -> None:
    driver = make_driver()
    driver.submit(prompt=[1], max_tokens=1, timeout=5.0)
    first = driver.submit(prompt=[1], max_tokens=1, timeout=1.0)
    assert driver.core.next_deadline() == driver.now + 1.0
    driver.cancel(first)
    assert driver.core.next_deadline() == driver.now + 5.0
    driver.run_until_idle()
    assert driver.core.next_deadline() is None


def test_timings_name_where_the_time_went_and_add_up() -> None:
    driver = make_driver(pipeline_depth=1)
    record = driver.submit(prompt=[1, 2, 3], max_tokens=2)
    driver.now += 0.5
    driver.schedule("g0")
    driver.core.add_plan_time("g0", 0.00001)
    driver.deliver("g0")  # 1000 us on the worker: 900 forward, 60 sample
    driver.now += 0.25
    driver.step("g0")
    timings = record.finished
    assert timings is not None
    assert timings.queue_us == 500_000
    assert timings.forward_us == 1800
    assert timings.sample_us == 120
    assert timings.plan_us == 10
    assert timings.wire_us == 250_000 + 2 * 40 - 10
    assert timings.total_us == 502_000 + 250_000


def test_sequence_numbers_wrap_around_and_skip_live_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = make_driver()
    registry: RequestRegistry = driver.core.requests
    driver.submit(prompt=[1], max_tokens=9)  # sequence 1 lives
    monkeypatch.setattr(registry, "_last_seq_id", 2**31 - 2)
    driver.submit(prompt=[1], max_tokens=9, n=2)
    plan = driver.schedule("g0")
    assert plan is not None
    assert plan.seq_ids == [1, 2**31 - 1, 2]
    driver.run_until_idle()
    driver.check_empty()


class Unhashable(int):
    """A token that makes the core fail with an error that it does not declare."""

    def __hash__(self) -> int:
        raise ZeroDivisionError("no hash")


def test_a_fault_while_results_are_processed_fails_the_requests_of_that_worker_group_alone() -> (
    None
):
    """Half of the result has been processed: none of its requests may go on, or stay open."""
    driver = make_driver(pipeline_depth=1)
    core = driver.core
    faulty = [driver.submit(prompt=[1, 2], max_tokens=9) for _ in range(3)]
    driver.schedule("g0")
    result = driver.links["g0"].results.popleft()
    result.token_ids[1] = Unhashable(result.token_ids[1])
    driver.add_worker_group(make_capacity("g1"))
    sound = driver.submit(prompt=[1, 2], max_tokens=4)
    driver.schedule("g1")
    with pytest.raises(ZeroDivisionError):
        core.update("g0", result, driver.now)
    core.fail_worker_group("g0", "ZeroDivisionError: no hash", driver.now)
    core.fail_worker_group("g0", "again", driver.now)
    core.check()
    del driver.links["g0"]
    driver.add_worker_group(make_capacity("g0"))
    later = driver.submit(prompt=[1, 2], max_tokens=4)
    driver.run_until_idle()
    assert [record.error and record.error.reason for record in faulty] == ["SCHEDULER_FAULT"] * 3
    assert "ZeroDivisionError: no hash" in str(faulty[0].error)
    assert sound.finished is not None
    assert later.finished is not None
    driver.check_empty()


def test_a_fault_takes_what_was_queued_off_the_accounts_of_tenants() -> None:
    driver = make_driver(make_capacity(num_gpu_blocks=6), max_num_seqs=2)
    running, preempted, waiting = [
        driver.submit(prompt=[number, *range(9)], max_tokens=10) for number in range(3)
    ]
    driver.step("g0", times=9)
    assert [len(r.choices[0].tokens) for r in (running, preempted, waiting)] == [9, 2, 0]
    driver.core.fail_worker_group("g0", "a fault", driver.now)
    driver.core.check()
    driver.collect()
    assert preempted.error is not None
    assert waiting.is_live
