"""What the scenarios do not show of requests that outgrow a group: limits, losses, drains."""

import dataclasses

import pytest

from scheduler_service.core import SchedulerConfig, TenantConfig
from scheduler_service.errors import GenerationFailed, PagewireError, PromptTooLong
from tests.support.core_driver import CoreDriver, make_capacity
from tests.support.records import RequestRecord

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, watermark=0.0)
SMALL, LARGE = 4, 10
"""Blocks, of 4 tokens each."""


def make_driver(**changes: object) -> CoreDriver:
    driver = CoreDriver(dataclasses.replace(CONFIG, **changes))  # type: ignore[arg-type]
    driver.add_worker_group(make_capacity("small", num_gpu_blocks=SMALL))
    return driver


def add(driver: CoreDriver, group_id: str, **changes: object) -> None:
    driver.add_worker_group(make_capacity(group_id, **({"num_gpu_blocks": LARGE} | changes)))


def under_way(driver: CoreDriver, **request: object) -> RequestRecord:
    """A request of which the small group has computed the prompt, and that is to outgrow it."""
    values: dict[str, object] = {"prompt": [1] * 13, "max_tokens": 12}
    record = driver.submit(**(values | request))  # type: ignore[arg-type]
    driver.schedule("small")
    driver.deliver("small")
    return record


def reason(record: RequestRecord) -> str | None:
    return None if record.error is None else record.error.reason


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("depth", [1, 3])
def test_it_goes_to_where_it_can_come_to_have_the_most_tokens(n: int, depth: int) -> None:
    driver = make_driver(pipeline_depth=depth)
    visited: dict[str, None] = {}
    driver.on_plan = lambda group_id, _: visited.setdefault(group_id)
    record = under_way(driver, n=n)
    add(driver, "alike", num_gpu_blocks=SMALL)
    add(driver, "middle", num_gpu_blocks=SMALL + 1)
    add(driver, "large")
    driver.run_until_idle()
    assert record.finished is not None
    assert list(visited) == ["small", "large"]
    driver.check_empty()


def test_moving_is_no_loss() -> None:
    driver = make_driver(max_worker_losses=1)
    record = under_way(driver)
    add(driver, "large")
    driver.run_until_idle()
    assert record.finished is not None
    assert record.num_losses == 0


def test_one_that_no_group_can_hold_fails_though_others_are_as_large() -> None:
    driver = make_driver()
    record = under_way(driver)
    add(driver, "alike", num_gpu_blocks=SMALL)
    add(driver, "other model", model="other")
    driver.run_until_idle()
    assert reason(record) == "KV_CACHE_TOO_SMALL"
    driver.check_empty()


def test_a_larger_group_whose_model_is_shorter_is_none() -> None:
    """It would end there as if it had all its tokens, and has fewer than it asked for."""
    driver = make_driver()
    record = under_way(driver)
    add(driver, "short", max_model_len=20)
    driver.schedule("small")
    driver.run_until_idle()
    assert reason(record) == "KV_CACHE_TOO_SMALL"


def test_a_larger_group_that_drains_takes_it_and_is_not_drained_before() -> None:
    driver = make_driver(pipeline_depth=3)
    record = under_way(driver, n=2)
    add(driver, "large")
    driver.core.drain_worker_group("large", driver.now)
    while record.is_live:
        leaves = driver.core.snapshot().num_running == 0
        assert not (leaves and driver.core.is_drained("large"))
        driver.schedule("small")
        driver.schedule("large")
        driver.deliver("small")
        driver.deliver("large")
        driver.collect()
    assert record.finished is not None
    assert driver.core.is_drained("large")


def test_what_has_died_is_waited_for_and_taken_by_one_that_came_in_its_place() -> None:
    driver = make_driver()
    record = under_way(driver)
    add(driver, "large")
    driver.lose_worker_group("large")
    driver.run_until_idle()
    assert record.is_live
    add(driver, "a little less", num_gpu_blocks=LARGE - 1)
    driver.run_until_idle()
    assert record.finished is not None
    late = under_way(driver)
    driver.core.drain_worker_group("a little less", driver.now)
    driver.lose_worker_group("a little less")
    driver.run_until_idle()
    assert reason(late) == "KV_CACHE_TOO_SMALL", "nobody is expected any more"


def test_what_has_died_is_waited_for_no_longer_than_is_configured() -> None:
    driver = make_driver(max_outgrown_wait_s=30.0)
    before, moved = (under_way(driver, prompt=[number] * 13) for number in (1, 2))
    driver.cancel(before)
    add(driver, "large")
    driver.lose_worker_group("large")
    lost_at = driver.now
    driver.run_until_idle()
    assert moved.is_live
    next_deadline = driver.core.next_deadline()
    assert next_deadline == pytest.approx(lost_at + 30.0)
    driver.expire(lost_at + 29.9 - driver.now)
    assert moved.is_live
    driver.expire(0.2)
    driver.collect()
    assert reason(moved) == "KV_CACHE_TOO_SMALL"
    assert "lost ones are waited for 30 s" in str(moved.error)
    driver.check_empty()
    late = under_way(driver)
    driver.run_until_idle()
    assert reason(late) == "KV_CACHE_TOO_SMALL", "it is not waited for again"
    assert driver.core.next_deadline() is None


def test_the_error_names_the_largest_cache_that_is_too_small() -> None:
    driver = make_driver()
    record = under_way(driver)
    add(driver, "large")
    while len(record.choices[0].tokens) < 10:
        for group_id in ("small", "large"):
            driver.schedule(group_id)
            driver.deliver(group_id)
        driver.collect()
    driver.lose_worker_group("large")
    add(driver, "middle", num_gpu_blocks=SMALL + 1)
    driver.run_until_idle()
    assert "has outgrown the KV cache of 20 tokens" in str(record.error)


@pytest.mark.parametrize("num_sizes", [1, 2])
@pytest.mark.parametrize(
    ("prompt_tokens", "num_received", "expected"),
    [(64, 0, PromptTooLong), (17, 0, PromptTooLong), (13, 8, GenerationFailed)],
    ids=["beyond the model", "beyond the cache", "with output"],
)
def test_what_a_former_core_accepted_waits_no_longer_than_is_configured(
    num_sizes: int, prompt_tokens: int, num_received: int, expected: type[PagewireError]
) -> None:
    """The group that held it may return, and may as well never have been there."""
    driver = CoreDriver(dataclasses.replace(CONFIG, max_outgrown_wait_s=30.0))
    record = driver.submit(prompt=[1] * prompt_tokens, max_tokens=12)
    driver.collect()
    assert record.accepted, "no group is there that could refuse it"
    if num_received:
        add(driver, "large")
        while len(record.choices[0].tokens) < num_received:
            driver.schedule("large")
            driver.deliver("large")
            driver.collect()
        driver.lose_worker_group("large")
    driver.lose_core()
    for less in range(num_sizes):
        add(driver, f"{less} less", num_gpu_blocks=SMALL - less)
    fits = driver.submit(prompt=[1] * 5, max_tokens=4)
    driver.run_until_idle()
    assert fits.finished is not None, "it holds up nobody"
    assert driver.core.next_deadline() == pytest.approx(driver.now + 30.0, abs=0.1)
    driver.expire(29.0)
    driver.collect()
    assert record.is_live
    driver.expire(1.1)
    driver.collect()
    assert isinstance(record.error, expected)
    assert driver.core.next_deadline() is None
    driver.check_empty()


@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("prompt_tokens", [17, 45], ids=["fits the lost group", "fits none"])
def test_each_request_of_a_former_core_waits_for_the_full_time(
    prompt_tokens: int, is_cancelled: bool
) -> None:
    """Whether or not another one waits, or did, or a new one."""
    driver = make_driver(max_outgrown_wait_s=30.0)
    prompt = [1] * prompt_tokens
    values: dict[str, object] = {"prompt": prompt, "max_tokens": 4, "was_accepted": True}
    first = driver.submit(**values)  # type: ignore[arg-type]
    driver.run_until_idle()
    driver.expire(20.0)
    add(driver, "large")
    driver.lose_worker_group("large")
    new = driver.submit(prompt=[1] * 18, max_tokens=4)
    driver.run_until_idle()
    if is_cancelled:
        driver.cancel(first)
    second = driver.submit(**values)  # type: ignore[arg-type]
    driver.run_until_idle()
    submitted_at = driver.now
    driver.expire(29.9)
    driver.collect()
    assert second.is_live
    assert driver.core.next_deadline() == pytest.approx(submitted_at + 30.0, abs=0.1)
    driver.expire(0.2)
    driver.collect()
    ended = [second, new] if is_cancelled else [first, second, new]
    assert [type(record.error) for record in ended] == [PromptTooLong] * len(ended)
    driver.check_empty()


def test_a_group_that_returns_in_time_takes_what_a_former_core_accepted() -> None:
    driver = CoreDriver(dataclasses.replace(CONFIG, max_outgrown_wait_s=30.0))
    record = driver.submit(prompt=[1] * 17, max_tokens=4)
    driver.lose_core()
    add(driver, "small", num_gpu_blocks=SMALL)
    driver.run_until_idle()
    driver.expire(29.0)
    add(driver, "large")
    driver.run_until_idle()
    assert record.finished is not None
    driver.check_empty()


def test_a_group_that_returned_and_was_lost_is_waited_for_as_long_as_any() -> None:
    driver = CoreDriver(dataclasses.replace(CONFIG, max_outgrown_wait_s=30.0))
    record = driver.submit(prompt=[1] * 17, max_tokens=4)
    driver.lose_core()
    add(driver, "small", num_gpu_blocks=SMALL)
    driver.run_until_idle()
    driver.expire(20.0)
    add(driver, "large")
    driver.lose_worker_group("large")
    driver.run_until_idle()
    driver.expire(20.0)
    driver.run_until_idle()
    assert record.is_live, "the lost group is expected for ten seconds more"
    add(driver, "larger")
    driver.run_until_idle()
    assert record.finished is not None
    driver.check_empty()


def test_a_new_request_waits_for_a_lost_worker_group_that_alone_is_large_enough() -> None:
    driver = make_driver()
    add(driver, "large")
    queued = driver.submit(prompt=[1] * 18, max_tokens=2)
    driver.lose_worker_group("large")
    late = driver.submit(prompt=[1] * 17, max_tokens=2)
    driver.run_until_idle()
    assert queued.is_live
    assert late.is_live
    add(driver, "replacement")
    driver.run_until_idle()
    assert queued.finished is not None
    assert late.finished is not None
    driver.check_empty()


def test_a_new_request_waits_no_longer_than_the_lost_worker_group_is_expected() -> None:
    driver = make_driver(max_outgrown_wait_s=30.0)
    add(driver, "large")
    driver.lose_worker_group("large")
    record = driver.submit(prompt=[1] * 17, max_tokens=2)
    driver.expire(29.0)
    driver.collect()
    assert record.is_live
    driver.expire(2.0)
    driver.collect()
    assert reason(record) == "PROMPT_LARGER_THAN_CACHE"
    with pytest.raises(PromptTooLong):
        driver.submit(prompt=[1] * 17, max_tokens=2)
    driver.check_empty()


def test_what_a_drained_worker_group_leaves_behind_is_not_stranded() -> None:
    driver = make_driver()
    record = under_way(driver)
    add(driver, "large")
    while driver.core.snapshot().num_running == 0 or not driver.links["large"].results:
        driver.schedule("small")
        driver.schedule("large")
        driver.deliver("small")
    driver.core.drain_worker_group("large", driver.now)
    driver.lose_worker_group("large")
    driver.run_until_idle()
    assert reason(record) == "KV_CACHE_TOO_SMALL", "nobody is expected"
    driver.check_empty()


def test_its_tenants_blocks_go_along() -> None:
    driver = make_driver(tenants={"small": TenantConfig(max_kv_blocks=6)})
    record = under_way(driver, tenant="small")
    add(driver, "large")
    driver.run_until_idle()
    assert record.finished is not None
    driver.check_empty()


def test_it_may_end_on_its_way() -> None:
    driver = make_driver(pipeline_depth=3)
    record = under_way(driver, n=2)
    add(driver, "large")
    while driver.core.snapshot().num_running:
        driver.schedule("small")
        driver.deliver("small")
    driver.cancel(record)
    driver.run_until_idle()
    driver.check_empty()


@pytest.mark.parametrize("known", [0, 8])
def test_a_new_core_takes_what_is_too_large_for_the_groups_that_have_come_so_far(
    known: int,
) -> None:
    driver = make_driver()
    add(driver, "large")
    record = driver.submit(prompt=[1] * 17, max_tokens=12)
    while len(record.choices[0].tokens) < known:
        driver.schedule("large")
        driver.deliver("large")
        driver.collect()
    del driver.links["large"]
    driver.collect()
    driver.lose_core()
    assert record.is_live
    driver.run_until_idle()
    assert record.is_live
    add(driver, "large")
    driver.run_until_idle()
    assert record.finished is not None
