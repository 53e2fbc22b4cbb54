"""Which worker group takes a request, by what it has, what it does and how fast it is."""

from collections.abc import Sequence
from typing import Any, cast

import pytest

from scheduler_service.core.admission.request_registry import RequestRegistry
from scheduler_service.core.config import PolicyName, SchedulerConfig, TenantConfig, WorkKind
from scheduler_service.core.context import ContextKind, ContextPart
from scheduler_service.core.policies.policy import Policy
from scheduler_service.core.routing.fleet import ServedModel
from scheduler_service.core.routing.router import RouteEstimate, Router
from scheduler_service.core.scheduler_stats import ModelTotals
from scheduler_service.core.scheduling.capacity_probe import CapacityEstimate, CapacityProbe
from scheduler_service.core.scheduling.scheduler import Scheduler
from scheduler_service.core.scheduling.scheduler import make_scheduler as make_group_scheduler
from scheduler_service.core.sequence import SequenceGroup, SequenceStatus
from scheduler_service.core.step_plan import StepResult
from scheduler_service.core.tenants import Tenants
from scheduler_service.errors import DeadlineExceeded, PromptTooLong
from tests.support.core_driver import (
    CoreDriver,
    RequestRecord,
    make_capacity,
    make_driver,
    make_request,
)
from tests.support.steps import make_work

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=256)
STEP_US = 1000
ENDED = SequenceStatus.FINISHED_ABORTED


class CountedPrompt(list[int]):
    """A prompt that counts how many of its tokens are looked at in pieces."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        piece = super().__getitem__(index)
        self.num_read += len(piece) if isinstance(index, slice) else 1
        return piece


class Deployment:
    """A model's worker groups, without the core around them: steps are answered at once."""

    def __init__(self, *schedulers: Scheduler) -> None:
        tenants = Tenants(CONFIG.default_tenant, {})
        self.model = ServedModel("m", Policy(tenants))
        self.schedulers = schedulers
        self.now_us = 0
        self._registry = RequestRegistry(Policy.rank, tenants)
        for scheduler in schedulers:
            self.model.add(scheduler)

    def submit(
        self, prompt: Sequence[int], *, max_tokens: int = 100, num_choices: int = 1
    ) -> SequenceGroup:
        """Queue a request."""
        handle = len(self._registry.seq_groups()) * 8 + 1
        request = make_request(
            handle=handle,
            request_id=f"r{handle}",
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            num_choices=num_choices,
        )
        group = self._registry.make_seq_group(request, self.now_us)
        self._registry.add(group)
        self.model.waiting.add(group)
        return group

    def join(self, scheduler: Scheduler) -> None:
        """One more worker group."""
        self.model.add(scheduler)
        self.schedulers += (scheduler,)

    def place(self) -> None:
        """Give what waits to worker groups."""
        self.model.route(lambda group: None, (), self.now_us)
        self.model.check()

    def where(self, group: SequenceGroup) -> str | None:
        """The worker group that has a request."""
        ids = [s.capacity.worker_group_id for s in self.schedulers if group in s.seq_groups]
        return ids[0] if ids else None

    def put(self, prompt: Sequence[int], **options: int) -> str | None:
        """Submit a request and place it."""
        group = self.submit(prompt, **options)
        self.place()
        return self.where(group)

    def run(self, num_steps: int = 1) -> None:
        """Some steps of all worker groups."""
        for _ in range(num_steps):
            for scheduler in self.schedulers:
                plan = scheduler.schedule(self.now_us, is_awaited=False)
                if plan is not None:
                    num_tokens = len(plan.seq_ids) if plan.output is None else sum(plan.output)
                    result = StepResult(step_id=plan.step_id, token_ids=[3] * num_tokens)
                    scheduler.update(result, self.now_us)
                for group in scheduler.departures.pop_ended():
                    self._registry.remove(group, self.now_us)
                    group.placement.release(group.tenant)


def make_scheduler(group_id: str, **changes: object) -> Scheduler:
    """A worker group with room for much."""
    values = {"num_gpu_blocks": 512, "max_model_len": 1024} | changes
    policy = Policy(Tenants(CONFIG.default_tenant, {}))
    capacity = make_capacity(group_id, **values)
    return make_group_scheduler(CONFIG, capacity, ModelTotals(), policy, 0)


def measure(scheduler: Scheduler, *, step_us: int = STEP_US, token_us: int = 10) -> None:
    """Record results with these costs per step and per prompt token."""
    for num_tokens in (0, 100):
        work = make_work(num_tokens=1 + num_tokens, num_prefill_tokens=num_tokens)
        busy_us = step_us + num_tokens * token_us
        scheduler.rates.observe(work, StepResult(step_id=1, token_ids=[1], busy_us=busy_us))


def prompt(first: int, length: int) -> list[int]:
    """Unlike all that begin with another token."""
    return [first] + [5] * (length - 1)


def test_a_group_that_is_twice_as_fast_gets_twice_as_much() -> None:
    slow, fast = make_scheduler("slow"), make_scheduler("fast")
    measure(slow, token_us=20)
    measure(fast, token_us=10)
    deployment = Deployment(slow, fast)
    places = [deployment.put(prompt(i, 8)) for i in range(6)]
    assert places.count("fast") == 4


@pytest.mark.parametrize("num_found", [None, 1])
def test_a_group_that_has_computed_no_prompts_counts_as_others_do(num_found: int | None) -> None:
    """Whether or not it has computed the last tokens of prompts that it has found."""
    used, other = make_scheduler("used"), make_scheduler("other")
    measure(used, token_us=1_000)
    for num_tokens in (0, num_found or 0):
        work = make_work(num_tokens=1 + num_tokens, num_prefill_tokens=num_tokens)
        other.rates.observe(work, StepResult(step_id=1, token_ids=[1], busy_us=STEP_US))
    deployment = Deployment(used, other)
    places = [deployment.put(prompt(i, 8)) for i in range(4)]
    assert sorted(places) == ["other", "other", "used", "used"]  # type: ignore[type-var]


def test_a_group_that_was_never_measured_counts_as_others_do() -> None:
    known, new = make_scheduler("known"), make_scheduler("new")
    measure(known, token_us=1_000)
    deployment = Deployment(known, new)
    assert [deployment.put(prompt(i, 8)) for i in range(4)] == ["known", "new"] * 2


def test_where_steps_take_equally_long_whatever_is_in_them_sequences_count() -> None:
    one, other = make_scheduler("one"), make_scheduler("other")
    measure(one, token_us=0)
    measure(other, token_us=0)
    deployment = Deployment(one, other)
    assert [deployment.put(prompt(i, 8)) for i in range(4)] == ["one", "other"] * 2


def test_prompts_that_wait_to_be_computed_count() -> None:
    deployment = Deployment(make_scheduler("g0"), make_scheduler("g1"))
    assert deployment.put(prompt(1, 200), max_tokens=1) == "g0"
    assert [deployment.put(prompt(i, 20), max_tokens=1) for i in (2, 3, 4)] == ["g1"] * 3


def test_a_prompt_goes_where_it_finds_free_blocks() -> None:
    deployment = Deployment(
        make_scheduler("small", num_gpu_blocks=40), make_scheduler("large", num_gpu_blocks=400)
    )
    assert deployment.put(prompt(1, 100)) == "large"


def test_blocks_on_the_host_count_as_what_it_takes_to_bring_them_back() -> None:
    cold = make_scheduler("cold")
    warm = make_scheduler("warm", num_gpu_blocks=16, num_cpu_blocks=64)
    deployment = Deployment(warm)
    conversation = prompt(1, 40)
    deployment.put(conversation, max_tokens=1)
    deployment.run(2)
    deployment.put(prompt(2, 60), max_tokens=1)  # it drives the first one's blocks out
    deployment.run(2)
    for scheduler in (cold, warm):
        measure(scheduler)
    both = Deployment(cold, warm)
    turn = both.submit([*conversation, 7], max_tokens=1)
    assert warm.probe.estimate(turn).num_moves > 2
    both.place()
    assert both.where(turn) == "warm"


def busy_where_it_began(num_gain_tokens: int) -> tuple[Deployment, SequenceGroup]:
    """A conversation whose blocks are in a group that is full, while another is idle."""
    full, idle = make_scheduler("full"), make_scheduler("idle")
    deployment = Deployment(full)
    conversation = prompt(1, num_gain_tokens)
    deployment.put(conversation, max_tokens=1)
    deployment.run(4)
    for number in range(CONFIG.max_num_seqs):
        deployment.put(prompt(2 + number, 4))
    deployment.run()
    both = Deployment(full, idle)
    for scheduler in (full, idle):
        measure(scheduler)
    return both, both.submit([*conversation, 7], max_tokens=2)


def test_a_turn_waits_for_its_blocks_if_they_are_worth_more_than_the_wait() -> None:
    deployment, turn = busy_where_it_began(800)
    deployment.place()
    assert deployment.where(turn) is None
    assert turn.placement.awaits == "full"
    later = deployment.submit(prompt(9, 4))
    deployment.place()
    assert deployment.where(later) == "idle"
    for group in list(deployment.schedulers[0].seq_groups)[:1]:
        deployment.schedulers[0].end_sequence(group.sequences[0], ENDED, 0)
    deployment.place()
    assert deployment.where(turn) == "full"
    assert turn.placement.awaits is None


def test_a_turn_waits_no_longer_than_it_would_gain() -> None:
    deployment, turn = busy_where_it_began(800)
    deployment.place()
    assert turn.placement.until_us is not None
    deployment.now_us = turn.placement.until_us - 1
    deployment.place()
    assert deployment.where(turn) is None
    deployment.now_us += 1
    deployment.place()
    assert deployment.where(turn) == "idle"


@pytest.mark.parametrize(("answers_before", "place"), [(2, "a"), (90, "b")])
def test_an_answer_is_taken_to_be_as_long_as_those_of_late(answers_before: int, place: str) -> None:
    driver = CoreDriver(CONFIG)
    for group_id in ("a", "b"):
        driver.add_worker_group(make_capacity(group_id, num_gpu_blocks=512, max_model_len=1024))
    conversation = prompt(1, 40)
    driver.submit(prompt=conversation, max_tokens=answers_before)
    driver.run_until_idle()
    driver.submit(prompt=[*conversation, 2], max_tokens=500)
    assert driver.schedule("a") is not None, "where its blocks are"
    # Beside what runs there, each token of a long answer costs more than the blocks are worth.
    driver.submit(prompt=[*conversation, 3], max_tokens=100)
    driver.schedule(place)
    counts = {
        g.worker_group_id: g.num_running_sequences for g in driver.core.snapshot().worker_groups
    }
    assert counts == ({"a": 2, "b": 0} if place == "a" else {"a": 1, "b": 1})


def test_a_prompt_is_hashed_once_for_all_groups() -> None:
    deployment = Deployment(*(make_scheduler(f"g{i}") for i in range(16)))
    tokens = CountedPrompt(prompt(1, 1000))
    group = deployment.submit(tokens)
    deployment.place()
    assert deployment.where(group) is not None
    assert 900 < tokens.num_read <= len(tokens)


def test_a_request_that_is_too_late_is_returned_for_its_caller_to_end() -> None:
    deployment = Deployment(make_scheduler("g0"))
    late, other = deployment.submit(prompt(1, 8)), deployment.submit(prompt(2, 8))
    error = DeadlineExceeded("too late")
    too_late, placed = deployment.model.route(lambda group: error if group is late else None, (), 0)
    assert too_late == [(late, error)]
    assert list(placed) == [other]
    assert late not in deployment.model.waiting
    assert late.num_unfinished == 1, "a question changes nothing"
    assert deployment.where(late) is None
    assert deployment.where(other) == "g0"


class Counted(Router):
    """Counts how often it is asked."""

    num_asked = 0

    def choose(self, *request: Any) -> RouteEstimate:
        self.num_asked += 1
        return super().choose(*request)


@pytest.mark.parametrize("useless", ["draining", "too small"])
def test_room_that_nothing_may_go_to_is_no_reason_to_look_at_what_waits(useless: str) -> None:
    groups = [make_scheduler(f"g{number}") for number in range(3)]
    last = make_scheduler("last", num_gpu_blocks=1 if useless == "too small" else 100)
    last.is_draining = useless == "draining"
    deployment = Deployment(*groups, last)
    deployment.model.router = router = Counted()
    for number in range(32):
        deployment.submit([number] * 8)
    deployment.place()
    assert router.num_asked >= 12, "places in the batches"
    router.num_asked = 0
    deployment.place()
    assert router.num_asked == 0
    last.is_draining = False
    deployment.model.sort_queue()
    if useless == "draining":
        deployment.place()
        assert last.seq_groups


class CountedProbe:
    """A worker group's room that counts how often it is looked at for a request."""

    def __init__(self, room: CapacityProbe) -> None:
        self.num_looks = 0
        self.inner = room

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def estimate(self, group: SequenceGroup) -> CapacityEstimate:
        """What is counted."""
        self.num_looks += 1
        return self.inner.estimate(group)

    def has_room_for(self, group: SequenceGroup) -> bool:
        """Counts, too."""
        self.num_looks += 1
        return self.inner.has_room_for(group)


NUM_FULL = 24


def without_blocks() -> tuple[Deployment, list[SequenceGroup]]:
    """Worker groups that have places but no blocks, and more requests than groups that wait."""
    groups = [make_scheduler(f"g{i:02}", num_gpu_blocks=16) for i in range(NUM_FULL)]
    deployment = Deployment(*groups)
    running = [deployment.submit(prompt(i, 50), max_tokens=10) for i in range(NUM_FULL)]
    deployment.place()
    deployment.run()
    assert all(deployment.where(group) for group in running)
    waiting = [deployment.submit(prompt(100 + i, 50)) for i in range(2 * NUM_FULL)]
    deployment.place()
    assert not any(deployment.where(group) for group in waiting)
    return deployment, waiting


def count_looks(deployment: Deployment) -> int:
    """In one round of placing."""
    probes = [CountedProbe(scheduler.probe) for scheduler in deployment.schedulers]
    for scheduler, probe in zip(deployment.schedulers, probes, strict=True):
        scheduler.probe = cast(CapacityProbe, probe)
    deployment.model.route(lambda group: None, (), 0)
    for scheduler, probe in zip(deployment.schedulers, probes, strict=True):
        scheduler.probe = probe.inner
    return sum(probe.num_looks for probe in probes)


def test_groups_that_have_not_changed_are_not_looked_at_again() -> None:
    deployment, _ = without_blocks()
    assert count_looks(deployment) == 0


def test_a_group_that_has_changed_is_looked_at_once_for_each_that_is_waited_for() -> None:
    deployment, waiting = without_blocks()
    changed = deployment.schedulers[NUM_FULL // 2]
    plan = changed.schedule(0, is_awaited=False)
    assert plan is not None
    changed.update(StepResult(step_id=plan.step_id, token_ids=[3]), 0)
    assert 0 < count_looks(deployment) <= NUM_FULL
    assert not any(deployment.where(group) for group in waiting)


def test_a_group_with_room_again_takes_the_first_that_waits() -> None:
    deployment, waiting = without_blocks()
    emptied = deployment.schedulers[NUM_FULL // 2]
    for group in list(emptied.seq_groups):
        emptied.end_sequence(group.sequences[0], ENDED, 0)
    # One at each for the first; for every other one at it, and at the one that the first awaited.
    assert count_looks(deployment) <= 4 * NUM_FULL
    assert deployment.where(waiting[0]) == emptied.capacity.worker_group_id
    assert not any(deployment.where(group) for group in waiting[1:])


def _lose(deployment: Deployment, scheduler: Scheduler) -> None:
    """The worker group is gone; its requests are placed elsewhere."""
    seq_groups, _ = scheduler.lose(deployment.now_us)
    deployment.model.remove(scheduler, deployment.now_us)
    deployment.model.sort_queue()
    deployment.schedulers = tuple(s for s in deployment.schedulers if s is not scheduler)
    deployment.model.requeue(seq_groups)
    deployment.place()


def _with_arithmetic(**arithmetic: str) -> tuple[Scheduler, ...]:
    return tuple(make_scheduler(name, arithmetic=value) for name, value in arithmetic.items())


def test_output_is_continued_by_a_group_of_the_same_arithmetic() -> None:
    schedulers = _with_arithmetic(a="avx512", b="avx2", c="avx512")
    deployment = Deployment(*schedulers)
    group = deployment.submit(range(10))
    deployment.place()
    assert deployment.where(group) == "a"
    deployment.run(2)
    _lose(deployment, schedulers[0])
    assert deployment.where(group) == "c"
    assert group.clock.timings.num_inexact_recoveries == 0


def test_output_waits_for_a_full_group_of_the_same_arithmetic() -> None:
    first, equal, other = _with_arithmetic(a="avx512", c="avx512", b="avx2")
    deployment = Deployment(equal)
    in_equal = [deployment.put(range(10), max_tokens=20) for _ in range(CONFIG.max_num_seqs)]
    assert in_equal == ["c"] * CONFIG.max_num_seqs
    deployment.run(2)
    deployment.join(first)
    group = deployment.submit(range(10))
    deployment.place()
    assert deployment.where(group) == "a"
    deployment.run(2)
    deployment.join(other)
    _lose(deployment, first)
    assert deployment.where(group) is None
    deployment.run(40)
    deployment.place()
    assert deployment.where(group) == "c"


def test_output_is_continued_by_another_arithmetic_if_none_is_equal_and_that_is_counted() -> None:
    schedulers = _with_arithmetic(a="avx512", b="avx2", c="avx2")
    deployment = Deployment(*schedulers)
    group = deployment.submit(range(10))
    deployment.place()
    deployment.run(2)
    assert deployment.where(group) == "a"
    _lose(deployment, schedulers[0])
    assert deployment.where(group) in ("b", "c")
    assert group.clock.timings.num_inexact_recoveries == 1
    totals = [scheduler.totals.num_inexact_recoveries for scheduler in schedulers]
    assert sum(totals) == 1
    deployment.run(2)
    _lose(deployment, next(s for s in deployment.schedulers if group in s.seq_groups))
    assert group.clock.timings.num_inexact_recoveries == 1


def test_a_request_without_output_is_recovered_on_any_arithmetic() -> None:
    schedulers = _with_arithmetic(a="avx512", b="avx2")
    deployment = Deployment(*schedulers)
    group = deployment.submit(range(10))
    deployment.place()
    _lose(deployment, schedulers[0])
    assert deployment.where(group) == "b"
    assert group.clock.timings.num_inexact_recoveries == 0


def test_one_that_came_later_and_takes_precedence_less_is_room_for_a_refused_request() -> None:
    driver = make_driver(make_capacity("leaving"), max_num_seqs=5, policy=PolicyName.PRIORITY)
    driver.add_worker_group(make_capacity("g1"))
    driver.add_worker_group(make_capacity("g2"))
    driver.submit(prompt=[1], max_tokens=4)
    driver.submit(prompt=[1], max_tokens=4, priority=1)
    for token in (2, 3, 4):  # the last of them is refused by both
        driver.submit(prompt=[token], max_tokens=4, n=3)
    driver.submit(prompt=[5], max_tokens=4, priority=1)
    driver.drain_worker_group("leaving")
    driver.schedule("leaving")
    driver.core.check()
    driver.run_until_idle()
    driver.check_empty()


def check_refused_after_30_s(driver: CoreDriver, waiting: RequestRecord) -> None:
    """The request waits for a worker group that is large enough, but not for ever."""
    driver.expire(29.0)
    driver.collect()
    assert waiting.is_live
    driver.expire(1.0)
    driver.collect()
    assert isinstance(waiting.error, PromptTooLong)
    driver.check_empty()


def test_a_prompt_that_fits_a_drained_group_alone_is_refused_if_none_replaces_it() -> None:
    driver = make_driver(make_capacity("large"), max_outgrown_wait_s=30.0, max_num_seqs=1)
    running = driver.submit(prompt=[1, 2, 3], max_tokens=4)
    driver.step("large")
    waiting = driver.submit(prompt=list(range(30)), max_tokens=4)
    driver.add_worker_group(make_capacity("small", num_gpu_blocks=5))
    driver.drain_worker_group("large")
    driver.run_until_idle()
    assert running.finished is not None
    assert driver.core.is_drained("large")
    driver.lose_worker_group("large")
    driver.run_until_idle()
    check_refused_after_30_s(driver, waiting)


def test_a_prompt_that_fits_a_draining_group_alone_which_dies_at_once_is_refused_in_time() -> None:
    """No group plans between the two events, so that nothing was routed meanwhile."""
    driver = make_driver(make_capacity("small", num_gpu_blocks=5), max_outgrown_wait_s=30.0)
    driver.add_worker_group(make_capacity("large"))
    waiting = driver.submit(prompt=list(range(30)), max_tokens=4)
    driver.drain_worker_group("large")
    driver.lose_worker_group("large")
    driver.run_until_idle()
    check_refused_after_30_s(driver, waiting)


@pytest.mark.parametrize(
    "changes", [{"num_gpu_blocks": 5}, {"work_kinds": {WorkKind.POOLING}}, {"max_model_len": 30}]
)
def test_a_group_that_joins_does_not_replace_a_lost_one_that_does_more(
    changes: dict[str, object],
) -> None:
    driver = make_driver(make_capacity("large"), max_outgrown_wait_s=30.0)
    driver.add_worker_group(make_capacity("small", num_gpu_blocks=5))
    driver.lose_worker_group("large")
    waiting = driver.submit(prompt=list(range(30)), max_tokens=4)
    driver.add_worker_group(make_capacity("another", **changes))
    driver.collect()
    assert waiting.is_live
    driver.add_worker_group(make_capacity("large again", num_gpu_blocks=12))
    driver.run_until_idle()
    assert waiting.finished is not None
    driver.check_empty()


def test_a_request_of_a_former_core_waits_for_the_replacement_of_a_draining_group() -> None:
    driver = make_driver(max_outgrown_wait_s=30.0)
    running = driver.submit(prompt=[1, 2, 3], max_tokens=40)
    driver.step("g0")
    driver.drain_worker_group("g0")
    waiting = driver.submit(prompt=list(range(8)), max_tokens=4, was_accepted=True)
    driver.run_until_idle()
    driver.expire(31.0)
    driver.collect()
    assert running.finished is not None
    assert waiting.is_live
    driver.lose_worker_group("g0")
    driver.expire(29.0)
    driver.add_worker_group(make_capacity("g1"))
    driver.run_until_idle()
    assert waiting.finished is not None
    driver.check_empty()


@pytest.mark.parametrize("returns", [True, False])
def test_a_request_with_more_tokens_than_the_groups_that_are_left_hold_waits_for_a_lost_one(
    returns: bool,
) -> None:
    driver = make_driver(make_capacity("large"), max_outgrown_wait_s=30.0)
    driver.add_worker_group(make_capacity("small", num_gpu_blocks=5))
    record = driver.submit(prompt=list(range(10)), max_tokens=40)
    driver.step("large", 22)
    driver.lose_worker_group("large")
    driver.run_until_idle()
    driver.expire(29.0)
    driver.collect()
    assert record.is_live
    if returns:
        driver.add_worker_group(make_capacity("large"))
        driver.run_until_idle()
        assert record.finished is not None
        assert len(record.choices[0].tokens) == 40
    else:
        driver.expire(1.0)
        driver.collect()
        assert record.error is not None
        assert record.error.reason == "KV_CACHE_TOO_SMALL"
        assert record.error.details["num_cache_tokens"] == "20"
    driver.check_empty()


@pytest.mark.parametrize("policy", PolicyName)
def test_a_request_that_waits_for_its_tenants_limit_is_not_passed_by_others_of_the_tenant(
    policy: PolicyName,
) -> None:
    """They have an adapter, and so wait in another queue; two of them need less than the limit."""
    tenants = {"limited": TenantConfig(max_kv_blocks=8)}
    capacity = make_capacity(num_gpu_blocks=64, max_loras=1)
    driver = make_driver(capacity, tenants=tenants, policy=policy, max_num_seqs=16)
    digest = bytes([1]) * 32
    driver.set_adapters({digest: "adapter"})
    context = (ContextPart(ContextKind.ADAPTER, digest),)

    def submit_small(number: int) -> None:
        max_tokens = 4 + number % 5  # so that they end at different times
        driver.submit(prompt=[5] * 6, max_tokens=max_tokens, tenant="limited", context=context)

    for number in range(4):
        submit_small(number)
    driver.step("g0")
    large = driver.submit(prompt=[9] * 20, max_tokens=9, tenant="limited")
    other = driver.submit(prompt=[9] * 20, max_tokens=9)
    for number in range(40):
        submit_small(number)
        driver.step("g0")
    assert other.finished is not None
    assert large.finished is not None
    driver.run_until_idle()
    driver.check_empty()
