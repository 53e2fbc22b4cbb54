"""What status pages see of requests and blocks."""

from scheduler_service.core import BeamParams, EarlyStopping, InspectionDetail, SchedulerConfig
from scheduler_service.core.inspection import RequestSnapshot
from scheduler_service.core.kv_cache.block_pool import CACHED
from scheduler_service.core.request_timing import (
    MAX_EVENTS,
    NUM_FIRST_EVENTS,
    RequestEvent,
    Timeline,
)
from scheduler_service.core.scheduler_stats import (
    FIRST_BOUND_US,
    GROWTH,
    NUM_BUCKETS,
    LatencyHistogram,
)
from tests.support.core_driver import CoreDriver, make_capacity
from tests.support.inspections import check_inspection

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8)


def make_driver(*, config: SchedulerConfig = CONFIG, **capacity: object) -> CoreDriver:
    driver = CoreDriver(config)
    driver.add_worker_group(make_capacity(**capacity))
    return driver


def step(driver: CoreDriver, times: int = 1) -> None:
    for _ in range(times):
        driver.step("g0")
        check_inspection(driver.core)


def live(driver: CoreDriver) -> dict[str, RequestSnapshot]:
    return {request.request_id: request for request in check_inspection(driver.core).requests}


def events(request: RequestSnapshot) -> list[str]:
    return [event.name for event, _, _ in request.events]


def test_free_blocks_with_contents_are_told_from_empty_ones() -> None:
    driver = make_driver()
    driver.submit(prompt=list(range(9)), max_tokens=2)
    driver.run_until_idle()
    device, _ = check_inspection(driver.core).block_maps["g0"]
    assert sorted(set(device.owners)) == [CACHED, 0]
    assert device.owners.count(CACHED) == 2


def test_a_first_token_of_a_former_core_is_not_counted_again() -> None:
    driver = make_driver()
    driver.submit(prompt=[1, 2, 3], max_tokens=6, request_id="a")
    step(driver, 2)
    driver.lose_core()
    driver.run_until_idle()
    assert not any(driver.core.snapshot().first_token_counts)


def test_only_what_is_asked_for_is_looked_at() -> None:
    driver = make_driver()
    for index in range(6):
        driver.submit(prompt=[index], max_tokens=9)
    step(driver)
    seen = driver.core.inspect(InspectionDetail())
    assert (seen.requests, seen.block_maps, seen.ended_requests) == ([], {}, [])
    seen = driver.core.inspect(InspectionDetail(include_requests=True, max_requests=5))
    assert [request.request_id for request in seen.requests] == ["r1", "r2", "r3", "r4", "r5"]
    assert (seen.num_unlisted_requests, seen.block_maps) == (1, {})
    assert all(request.block_tables == [] for request in seen.requests)


def test_latencies_are_counted_once_for_each_token() -> None:
    driver = make_driver()
    driver.submit(prompt=[1, 2], max_tokens=5)
    driver.submit(prompt=[3, 4], max_tokens=4, n=2)
    driver.run_until_idle()
    counts = driver.core.snapshot()
    assert sum(counts.first_token_counts) == 2
    assert sum(counts.inter_token_counts) == counts.num_generated_tokens - 3


def test_a_first_token_counts_though_its_request_has_left_the_batch_meanwhile() -> None:
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=16, watermark=0, pipeline_depth=3
    )
    driver = make_driver(config=config, num_gpu_blocks=5)
    driver.submit(prompt=[1] * 7, max_tokens=9)
    driver.submit(prompt=[2] * 8, max_tokens=4, request_id="preempted")
    for _ in range(3):
        driver.schedule("g0")
    assert events(live(driver)["preempted"])[-1] == "PREEMPTED"
    driver.deliver("g0")
    driver.collect()
    assert events(live(driver)["preempted"])[-2:] == ["PREFILLED", "FIRST_TOKEN"]
    assert sum(driver.core.snapshot().first_token_counts) == 2
    driver.run_until_idle()
    assert sum(driver.core.snapshot().first_token_counts) == 2


def test_prompts_of_beams_take_nothing_from_the_latencies_of_others() -> None:
    driver = make_driver()
    driver.submit(prompt=[1, 2], max_tokens=5)
    step(driver)
    params = BeamParams(width=2, length_penalty=1.0, early_stopping=EarlyStopping.NEVER)
    driver.submit(prompt=[3, 4], max_tokens=3, beam_search=params)
    driver.run_until_idle()
    assert sum(driver.core.snapshot().inter_token_counts) == 4


def test_a_histogram_puts_a_time_under_the_first_bound_that_holds_it() -> None:
    histogram = LatencyHistogram()
    for us in (0, FIRST_BOUND_US, 1_000, 25_000, 10**12):
        histogram.add(us)
    buckets = [index for index, count in enumerate(histogram.counts) for _ in range(count)]
    assert buckets[:2] == [0, 0]
    for us, bucket in zip((1_000, 25_000), buckets[2:4], strict=True):
        assert FIRST_BOUND_US * GROWTH ** (bucket - 1) < us <= FIRST_BOUND_US * GROWTH**bucket
    assert buckets[4] == NUM_BUCKETS - 1


def test_a_long_timeline_keeps_its_beginning_and_its_end() -> None:
    timeline = Timeline()
    for at_us in range(500):
        timeline.add(RequestEvent.PREFILLED, at_us, at_us)
    times = [at_us for _, at_us, _ in timeline.entries]
    last = list(range(500 - MAX_EVENTS + NUM_FIRST_EVENTS, 500))
    assert times == [*range(NUM_FIRST_EVENTS), *last]
    for at_us in range(200):
        timeline.add_placement(f"g{at_us}", at_us)
    assert len(timeline.placements) <= MAX_EVENTS
    assert timeline.placements[0] == "g0"
    assert timeline.placements[-1] == "g199"
