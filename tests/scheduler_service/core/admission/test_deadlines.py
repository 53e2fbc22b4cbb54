"""Deadlines as inputs to scheduling; scenarios/deadlines.txt shows what becomes of requests."""

from dataclasses import replace
from random import Random

import pytest

from scheduler_service.core import PolicyName, Request, SchedulerConfig, SchedulerCore
from scheduler_service.core.admission.deadlines import _min_wait_us, _work_us
from scheduler_service.errors import DeadlineExceeded, DeadlineUnreachable
from tests.support.core_driver import CoreDriver, make_capacity
from tests.support.virtual import GPU_CONFIG, script, serve

ALONE = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64)


class EstimatingCore(SchedulerCore):
    """Records, for each request that comes, the least time to its first token."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.estimates: dict[int, tuple[float, float]] = {}
        """Of the queue and of its own work, in seconds, by handle."""

    def submit(self, request: Request, now: float) -> None:
        super().submit(request, now)
        group = self._registry.find(request.tenant, request.request_id)
        assert group is not None
        model = self._fleet.models["m"]
        estimate = _min_wait_us(group, model) / 1e6, _work_us(group, model) / 1e6
        self.estimates[request.handle] = estimate


@pytest.mark.parametrize("policy", PolicyName)
@pytest.mark.parametrize("rate", [3.0, 12.0, 30.0])
def test_the_estimate_is_never_more_than_the_time_it_takes(policy: PolicyName, rate: float) -> None:
    """Under light and heavy load, with tenants and answers of all lengths."""
    rng = Random(f"{policy}/{rate}")
    core = EstimatingCore(replace(GPU_CONFIG, policy=policy, max_num_seqs=16))
    scripts = [
        script(
            number,
            at=rng.uniform(0, 300 / rate),
            tenant=rng.choice("aab"),
            prompt=rng.randint(10, 1500),
            num_tokens=rng.choice([1, 10, 200]),
        )
        for number in range(300)
    ]
    num_waits = 0
    for history in serve(core, scripts):
        wait, own = core.estimates[history.request.handle]
        assert history.first_token is not None
        assert wait + own <= history.first_token - history.submitted + 1e-6
        num_waits += wait > 0
    assert num_waits > 100 or rate < 30


def make_measured_driver(config: SchedulerConfig = ALONE, **capacity: object) -> CoreDriver:
    """A core that has seen requests: 100 us per prompt token, 1 ms per output token."""
    driver = CoreDriver(config)
    driver.add_worker_group(make_capacity(**capacity))
    for token in (30, 31):
        driver.submit(prompt=[token] * 10, max_tokens=5)
        driver.run_until_idle()
    return driver


def test_nothing_is_refused_before_anything_is_measured() -> None:
    driver = CoreDriver(ALONE)
    driver.submit(prompt=[1] * 60, max_tokens=3, timeout=1e-6)
    driver.add_worker_group(make_capacity())
    driver.submit(prompt=[2] * 60, max_tokens=3, timeout=1e-6)


def test_a_group_that_was_never_measured_may_be_fast_enough() -> None:
    driver = make_measured_driver()
    driver.add_worker_group(make_capacity("new"))
    driver.submit(prompt=[1] * 60, max_tokens=3, timeout=1e-6)


def test_own_work_that_takes_too_long_is_refused_with_the_numbers() -> None:
    driver = make_measured_driver()
    with pytest.raises(DeadlineExceeded) as caught:
        driver.submit(prompt=[1] * 40, max_tokens=3, timeout=0.0035)
    assert caught.value.details == {"min_ms": "4.0", "remaining_ms": "3.5"}
    assert caught.value.retry_delay_s is None


def test_tokens_that_must_be_generated_count_with_the_prompt() -> None:
    driver = make_measured_driver(max_model_len=512, num_gpu_blocks=128)
    with pytest.raises(DeadlineExceeded) as caught:
        driver.submit(prompt=[1] * 10, max_tokens=400, min_tokens=300, timeout=0.25)
    assert caught.value.details == {"min_ms": "300.0", "remaining_ms": "250.0"}
    driver.submit(prompt=[1] * 10, max_tokens=400, min_tokens=300, timeout=0.3)


def test_tokens_that_are_cached_take_no_time() -> None:
    driver = make_measured_driver()
    prompt = [i % 7 for i in range(40)]
    driver.submit(prompt=prompt, max_tokens=1)
    driver.run_until_idle()
    driver.submit(prompt=prompt, max_tokens=1, timeout=0.001)


def test_tokens_that_the_host_has_take_no_time() -> None:
    driver = make_measured_driver(num_cpu_blocks=64)
    prompt = [i % 7 for i in range(40)]
    for tokens in (prompt, [9] * 60):  # the second drives the blocks of the first out
        driver.submit(prompt=tokens, max_tokens=1)
        driver.run_until_idle()
    record = driver.submit(prompt=prompt, max_tokens=1, timeout=0.003)
    driver.run_until_idle()
    assert record.cached_tokens > 30


def test_no_more_tokens_are_waited_for_than_there_is_room_for() -> None:
    driver = make_measured_driver()
    driver.submit(prompt=[1] * 10, max_tokens=3, min_tokens=50, timeout=0.02)
    driver.submit(prompt=[2] * 61, max_tokens=100, min_tokens=50, timeout=0.02)
    with pytest.raises(DeadlineExceeded):
        driver.submit(prompt=[3] * 10, max_tokens=50, min_tokens=50, timeout=0.02)


def test_a_prompt_that_another_request_may_compute_before_takes_no_time() -> None:
    driver = make_measured_driver()
    prompt = [i % 7 for i in range(40)]
    driver.submit(prompt=prompt, max_tokens=1)
    driver.submit(prompt=[*prompt[:4], 9], max_tokens=1, timeout=1e-4)
    with pytest.raises(DeadlineExceeded):
        driver.submit(prompt=[8, *prompt], max_tokens=1, timeout=1e-4)


def test_a_deadline_that_has_passed_is_refused() -> None:
    driver = make_measured_driver()
    with pytest.raises(DeadlineExceeded, match="has passed"):
        driver.submit(prompt=[1], max_tokens=1, timeout=0.0)


def test_a_request_ahead_of_the_queue_is_not_told_to_wait_for_it() -> None:
    driver = make_measured_driver(replace(ALONE, policy=PolicyName.PRIORITY))
    for i in range(10):
        driver.submit(prompt=[i] * 10, max_tokens=20)
    driver.run_until_idle()
    for i in range(10):
        driver.submit(prompt=[10 + i] * 10, max_tokens=20)
    with pytest.raises(DeadlineUnreachable) as caught:
        driver.submit(prompt=[20] * 10, max_tokens=1, timeout=0.02)
    assert caught.value.retry_delay_s == 0.1
    driver.submit(prompt=[20] * 10, max_tokens=1, timeout=0.02, priority=-1)


def test_a_request_that_is_late_when_its_turn_comes_is_not_computed() -> None:
    driver = make_measured_driver()
    driver.submit(prompt=[1] * 10, max_tokens=9)
    assert driver.schedule("g0") is not None
    late = driver.submit(prompt=[2] * 40, max_tokens=3, timeout=1.0)
    driver.now += 0.998
    while driver.deliver("g0"):
        driver.schedule("g0")
    driver.collect()
    assert isinstance(late.error, DeadlineExceeded)
    assert late.error.details == {"min_ms": "4.0", "remaining_ms": "1.0"}
    assert not late.choices[0].tokens


def test_a_request_in_a_batch_has_until_its_deadline() -> None:
    driver = make_measured_driver()
    record = driver.submit(prompt=[2] * 40, max_tokens=30, timeout=1.0)
    driver.schedule("g0")
    driver.expire(0.9999)
    driver.collect()
    assert record.is_live
    driver.expire(0.0001)
    driver.collect()
    assert isinstance(record.error, DeadlineExceeded)
