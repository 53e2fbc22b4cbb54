"""Requests are placed by their adapters: a worker group gets few of them at a time, and each gets
its turn."""

import pytest

from scheduler_service.core import ContextKind, ContextPart, SchedulerConfig
from scheduler_service.core.config import TenantConfig
from scheduler_service.core.inspection import InspectionDetail
from scheduler_service.core.routing.router import MAX_SLOT_WAIT_US
from scheduler_service.errors import TenantLimit, UnknownAdapter
from tests.support.core_driver import MODEL, SMALL_CONFIG, CoreDriver, make_capacity
from tests.support.records import RequestRecord

DIGESTS = {name: bytes([number]) * 32 for number, name in enumerate("abcd")}


def make_driver(*max_loras: int, config: SchedulerConfig = SMALL_CONFIG) -> CoreDriver:
    """A core with all adapters, and a worker group for each number of slots."""
    driver = CoreDriver(config)
    driver.core.set_adapters(
        MODEL, {digest.hex(): name for name, digest in DIGESTS.items()}, 0.0, is_settling=False
    )
    for index, number in enumerate(max_loras):
        driver.add_worker_group(make_capacity(f"g{index}", max_loras=number))
    return driver


def submit(driver: CoreDriver, name: str, max_tokens: int = 4, **fields: object) -> RequestRecord:
    """A request with an adapter; an empty name for none."""
    context = (ContextPart(ContextKind.ADAPTER, DIGESTS[name]),) if name else ()
    prompt = [1 + len(driver.records) % 20, 2]
    return driver.submit(prompt=prompt, max_tokens=max_tokens, context=context, **fields)  # type: ignore[arg-type]


def running(driver: CoreDriver, group: str = "g0") -> set[bytes | None]:
    """The adapters of a group's running requests."""
    scheduler = driver.core._fleet.schedulers[group]
    return {seq_group.adapter for seq_group in scheduler.seq_groups if seq_group.num_running}


def has_begun(driver: CoreDriver, record: RequestRecord) -> bool:
    """Whether a request has been in a batch."""
    seq_group = driver.core.requests.find("", record.request.request_id)
    return seq_group is None or seq_group.has_begun


def test_a_worker_group_has_few_adapters_at_a_time_and_requests_without_any_pass() -> None:
    driver = make_driver(1)
    submit(driver, "a", 20)
    waiting, plain = submit(driver, "b"), submit(driver, "")
    for _ in range(10):
        driver.step("g0")
        driver.core.check()
        assert running(driver) <= {DIGESTS["a"], None}
    assert plain.finished is not None
    assert waiting.finished is None
    driver.run_until_idle()
    assert waiting.finished is not None
    driver.check_empty()


def test_a_request_ends_if_workers_without_adapters_have_come_to_a_new_core() -> None:
    driver = CoreDriver(SMALL_CONFIG)
    record = submit(driver, "a")
    driver.add_worker_group(make_capacity("g0"))
    driver.collect()
    assert isinstance(record.error, UnknownAdapter)
    driver.check_empty()


def test_a_request_that_has_begun_waits_for_workers_with_adapters_for_a_time() -> None:
    driver = make_driver(1)
    record = submit(driver, "a", 20)
    driver.step("g0", 3)
    driver.lose_worker_group("g0")
    driver.add_worker_group(make_capacity("g1"))
    driver.run_until_idle()
    assert record.is_live
    assert driver.config.max_outgrown_wait_s is not None
    driver.expire(driver.config.max_outgrown_wait_s)
    driver.collect()
    assert isinstance(record.error, UnknownAdapter)
    driver.check_empty()


def test_requests_of_an_adapter_with_a_slot_pass_others_but_not_for_long() -> None:
    driver = make_driver(1)
    submit(driver, "a", 20)
    waiting, later = submit(driver, "b", 20), submit(driver, "a", 20)
    driver.step("g0", 2)
    assert has_begun(driver, later)
    driver.now += MAX_SLOT_WAIT_US / 1e6
    last = submit(driver, "a", 4)
    while not has_begun(driver, waiting):
        driver.step("g0")
        assert not has_begun(driver, last)
    driver.run_until_idle()
    assert last.finished is not None
    driver.check_empty()


def test_an_adapter_goes_where_it_has_a_slot_and_stays_where_it_was_used() -> None:
    driver = make_driver(1, 1)
    for name in "ab":
        submit(driver, name, 20)
    driver.step("g0")
    driver.step("g1")
    homes = {next(iter(running(driver, group))): group for group in ("g0", "g1")}
    assert homes.keys() == {DIGESTS["a"], DIGESTS["b"]}
    driver.run_until_idle()
    for name in "baab":
        submit(driver, name)
        driver.step("g0")
        driver.step("g1")
        assert running(driver, homes[DIGESTS[name]]) == {DIGESTS[name]}
        driver.run_until_idle()
    driver.check_empty()


def test_a_status_names_the_adapters_of_requests_and_those_in_slots() -> None:
    driver = make_driver(2)
    detail = InspectionDetail(include_requests=True)

    def adapters() -> str:
        [group] = driver.core.snapshot().worker_groups
        return group.adapters

    assert adapters() == ""
    for name in ("a", "b", "a", ""):
        submit(driver, name, 20)
    driver.step("g0", 2)
    assert adapters() == "b 1, a 2"
    seen = driver.core.inspect(detail)
    assert sorted(request.lora for request in seen.requests) == ["", "a", "a", "b"]
    driver.run_until_idle()
    assert adapters() == "b 0, a 0"
    driver.core.set_adapters(MODEL, {DIGESTS["a"].hex(): "new"}, 0.0, is_settling=False)
    assert adapters() == f"{DIGESTS['b'].hex()[:12]} 0, new 0"
    ended = driver.core.inspect(detail).ended_requests
    assert sorted(request.lora for request in ended) == ["", "a", "a", "b"]


def test_requests_keep_their_adapter_when_their_worker_group_is_lost() -> None:
    driver = make_driver(2, 1)
    records = [submit(driver, name, 12) for name in "abcab"]
    driver.step("g0", 3)
    driver.lose_worker_group("g0")
    driver.run_until_idle()
    assert all(record.finished is not None for record in records)
    driver.check_empty()


def test_adapters_that_workers_lack_and_too_many_of_a_tenant_are_refused() -> None:
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=16, tenants={"t": TenantConfig(max_loras=1)}
    )
    driver = make_driver(2, config=config)
    driver.core.set_adapters(
        MODEL, {DIGESTS[name].hex(): name for name in "ab"}, 0.0, is_settling=False
    )
    with pytest.raises(UnknownAdapter, match="adapters: a, b"):
        submit(driver, "c")
    submit(driver, "a", tenant="t")
    submit(driver, "a", tenant="t")
    with pytest.raises(TenantLimit, match="max_loras=1"):
        submit(driver, "b", tenant="t")
    submit(driver, "b")
    assert driver.core.requests.num_with(MODEL, DIGESTS["a"]) == 2
    found = {(MODEL, DIGESTS["a"], False): 2, (MODEL, DIGESTS["b"], False): 1}
    assert driver.core.requests.by_adapter() == found
    driver.run_until_idle()
    assert not driver.core.requests.by_adapter()
    driver.check_empty()


def test_requests_with_an_adapter_that_is_lost_end_and_others_go_on() -> None:
    driver = make_driver(2)
    ending, staying = submit(driver, "a", 20), submit(driver, "b", 20)
    driver.step("g0", 3)
    waiting = submit(driver, "a", 20)
    driver.set_adapters({DIGESTS["b"]: "b"})
    driver.collect()
    for record in (ending, waiting):
        assert isinstance(record.error, UnknownAdapter)
    driver.run_until_idle()
    assert staying.finished is not None
    driver.check_empty()


def test_adapters_that_a_model_has_no_more_are_forgotten() -> None:
    """A core may see any number of adapters in its life."""
    driver = make_driver(2)
    submit(driver, "a")
    submit(driver, "b")
    requests = driver.core.requests
    driver.set_adapters({DIGESTS["b"]: "b"})
    driver.core.set_adapters("other", {}, driver.now, is_settling=False)
    numbers = [requests.num_ever_with(MODEL, DIGESTS[name]) for name in "ab"]
    assert numbers == [0, 1]
    driver.run_until_idle()
    assert requests.num_ever_with(MODEL, DIGESTS["b"]) == 1
    driver.check_empty()


def test_requests_wait_while_more_adapters_may_become_known() -> None:
    """As at a core that has started, to which the worker that has the adapter comes later."""
    driver = CoreDriver(SMALL_CONFIG)
    driver.core.set_adapters(MODEL, {}, driver.now, is_settling=True)
    first = submit(driver, "a")
    driver.add_worker_group(make_capacity("g0", max_loras=1))
    others = [submit(driver, "b"), submit(driver, "c"), submit(driver, "")]
    driver.step("g0", 8)
    driver.core.check()
    assert others[2].finished is not None
    known = {DIGESTS[name].hex(): name for name in "ab"}
    driver.core.set_adapters(MODEL, known, driver.now, is_settling=True)
    assert driver.core.pop_woken() == {"g0"}
    driver.step("g0", 12)
    assert first.finished is not None
    assert others[0].finished is not None
    driver.core.set_adapters(MODEL, known, driver.now, is_settling=False)
    driver.collect()
    assert isinstance(others[1].error, UnknownAdapter)
    with pytest.raises(UnknownAdapter):
        submit(driver, "c")
    driver.check_empty()
