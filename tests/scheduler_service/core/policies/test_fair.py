"""Fair shares, in simulated time and account by account."""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import combinations
from random import Random

import numpy as np
import pytest

from scheduler_service.core import PolicyName, SchedulerCore, TenantConfig
from scheduler_service.core.policies.fair import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST, Fair
from scheduler_service.core.sequence import SequenceGroup
from scheduler_service.core.tenants import Tenants
from tests.support.core_driver import make_driver
from tests.support.tenants import make_group
from tests.support.virtual import GPU_CONFIG, GPU_GROUP, script, serve
from tools.what_if.trace import RequestHistory

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 4.0}
CALM_RATE, FLOOD_RATE = 1.0, 10.0
"""Requests per second. The calm tenant needs less than its share; the flood cannot be served."""


def requests(
    tenant: str, interval: Callable[[Random], float], until: float
) -> list[RequestHistory]:
    """Requests at random intervals, with prompts and answers of random lengths."""
    rng = Random(tenant)
    scripts: list[RequestHistory] = []
    at = interval(rng)
    while at < until:
        prompt, num_tokens = rng.randint(500, 1500), rng.randint(50, 250)
        scripts.append(script(0, at=at, prompt=prompt, num_tokens=num_tokens, tenant=tenant))
        at += interval(rng)
    return scripts


def in_order(scripts: Iterable[RequestHistory]) -> list[RequestHistory]:
    """The scripts by time of arrival, numbered."""
    return [
        replace(
            arrival,
            number=number,
            request=replace(arrival.request, handle=number + 1, request_id=f"r{number}"),
        )
        for number, arrival in enumerate(sorted(scripts, key=lambda script: script.submitted))
    ]


def service(histories: Iterable[RequestHistory], tenant: str, until: float) -> float:
    """A tenant's service up to a time: prompts that have a first token, and output tokens."""
    total = 0.0
    for history in histories:
        if history.request.tenant == tenant:
            num_tokens = bisect_right(history.choices[0].times, until)
            prompt = PROMPT_TOKEN_COST * len(history.request.prompt_token_ids)
            total += (prompt if num_tokens else 0.0) + OUTPUT_TOKEN_COST * num_tokens
    return total


def shares(policy: PolicyName, until: float = 30.0) -> dict[str, float]:
    """The part of the service that each tenant gets when all send more than can be served."""
    tenants = {name: TenantConfig(weight=weight) for name, weight in WEIGHTS.items()}
    config = replace(GPU_CONFIG, policy=policy, tenants=tenants)
    scripts = [sent for name in WEIGHTS for sent in requests(name, bursts_of(20.0), until)]
    histories = serve(SchedulerCore(config), in_order(scripts), until=until)
    services = {name: service(histories, name, until) for name in WEIGHTS}
    return {name: value / sum(services.values()) for name, value in services.items()}


def bursts_of(rate: float) -> Callable[[Random], float]:
    """Random intervals between `rate` requests per second."""
    return lambda rng: rng.expovariate(rate)


def first_token_p99(policy: PolicyName, *, flooded: bool, until: float = 60.0) -> float:
    """The calm tenant's 99th percentile of the time to the first token, in seconds."""
    scripts = requests("calm", lambda rng: rng.uniform(0.5, 1.5) / CALM_RATE, until)
    if flooded:
        scripts += requests("flood", bursts_of(FLOOD_RATE), until)
    end = 4 * until
    core = SchedulerCore(replace(GPU_CONFIG, policy=policy))
    histories = serve(core, in_order(scripts), until=end)
    waits = [
        (end if history.first_token is None else history.first_token) - history.submitted
        for history in histories
        if history.request.tenant == "calm"
    ]
    return float(np.percentile(waits, 99, method="inverted_cdf"))


def slowdown(policy: PolicyName) -> float:
    """The calm tenant's time to the first token (p99) during the flood, relative to that alone."""
    return first_token_p99(policy, flooded=True) / first_token_p99(policy, flooded=False)


def test_saturated_tenants_get_shares_by_weight_within_five_percent() -> None:
    for tenant, share in shares(PolicyName.FAIR).items():
        assert share == pytest.approx(WEIGHTS[tenant] / sum(WEIGHTS.values()), rel=0.05)


def test_a_flood_makes_a_calm_tenant_wait_at_most_half_as_long_again() -> None:
    assert slowdown(PolicyName.FAIR) <= 1.5


def test_first_come_first_served_lets_a_calm_tenant_wait_for_the_flood() -> None:
    assert slowdown(PolicyName.FCFS) > 10


def greatest_difference(policy: PolicyName, seed: int) -> float:
    """The greatest difference in service per weight among tenants that all have requests waiting,
    in units of what the policy's docstring allows."""
    weights = {"a": 1.0, "b": 1.0, "c": 2.5}
    tenants = {name: TenantConfig(weight=weight) for name, weight in weights.items()}
    config = replace(GPU_CONFIG, policy=policy, max_num_seqs=8, tenants=tenants)
    group = replace(GPU_GROUP, num_gpu_blocks=256)
    # Each has more than it can be served, and they come one tenant after the other.
    scripts = [
        script(
            0,
            at=0.001 * number,
            prompt=50 + (seed * 37 + i * i * 13) % (700 if name == "a" else 300),
            num_tokens=1 + (seed * 11 + i * 7) % (200 if name == "b" else 60),
            tenant=name,
        )
        for number, name in enumerate(weights)
        for i in range(200)
    ]
    histories = serve(SchedulerCore(config), in_order(scripts), group=group, until=15.0)
    longest = max(len(sent.request.prompt_token_ids) for sent in scripts)
    bound = 2 * max(longest, 2 * group.num_cache_tokens) / min(weights.values())
    return max(
        abs(served[one] / weights[one] - served[other] / weights[other]) / bound
        for served in (
            {name: service(histories, name, 0.5 * (i + 1)) for name in weights} for i in range(30)
        )
        for one, other in combinations(weights, 2)
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_difference_in_service_stays_within_the_bound(seed: int) -> None:
    assert greatest_difference(PolicyName.FAIR, seed) <= 1.0


# Accounts.


def make_fair(**weights: float) -> tuple[Fair, Tenants]:
    tenants = Tenants(
        TenantConfig(), {name: TenantConfig(weight=weight) for name, weight in weights.items()}
    )
    return Fair(tenants), tenants


def test_prompts_are_charged_once_and_outputs_twice_their_number_by_weight() -> None:
    fair, tenants = make_fair(heavy=4.0)
    group = make_group(tenants, "heavy", num_prompt_tokens=100)
    fair.record_placed(group)
    group.placement.place(group.tenant, 0, 0)
    fair.record_placed(group)
    assert fair.key(group)[0] == 25
    fair.record_tokens(group.sequences * 10)
    assert fair.key(group)[0] == 30


def test_who_comes_back_is_lifted_to_those_who_wait_but_never_lowered() -> None:
    fair, tenants = make_fair()
    busy, idle = make_group(tenants, "busy", num_prompt_tokens=70), make_group(tenants, "idle")
    fair.open_queue(busy.tenant, None)
    fair.record_placed(busy)
    fair.open_queue(idle.tenant, busy)
    assert fair.key(idle)[0] == fair.key(busy)[0] == 70
    fair.record_tokens(idle.sequences * 40)
    fair.open_queue(idle.tenant, busy)
    assert fair.key(idle)[0] == 150


def test_where_nobody_waits_who_comes_back_is_lifted_to_the_last_who_did() -> None:
    fair, tenants = make_fair()
    last, new = make_group(tenants, "last", num_prompt_tokens=70), make_group(tenants, "new")
    fair.record_placed(last)
    fair.close_queue(last.tenant)
    fair.record_tokens(last.sequences * 5)
    fair.open_queue(new.tenant, None)
    assert fair.key(new)[0] == 80


def test_accounts_of_tenants_that_are_gone_are_forgotten_unless_they_had_more() -> None:
    fair, tenants = make_fair()
    for i in range(1000):
        group = make_group(tenants, f"passing{i}", num_prompt_tokens=10)
        tenants.add_request(group.tenant, i)
        fair.open_queue(group.tenant, None)
        fair.record_placed(group)
        fair.close_queue(group.tenant)
        tenants.remove_request(group.tenant, 10, i)
        if i == 0:
            served_most = make_group(tenants, "most", num_prompt_tokens=50_000)
            fair.record_placed(served_most)
    assert len(fair) < 200
    assert fair.key(served_most)[0] == 50_000


def places(tenants: Tenants, **num_groups: int) -> list[SequenceGroup]:
    """Running groups of one choice each, the given number per tenant, one tenant after another."""
    names = [name for name, number in num_groups.items() for _ in range(number)]
    groups = []
    for arrival, name in enumerate(names):
        group = make_group(tenants, name, arrival=arrival)
        tenants.add_request(group.tenant, 0)
        group.num_running = 1
        groups.append(group)
    return groups


def test_the_last_of_the_tenant_with_the_most_places_yield_until_both_have_as_many() -> None:
    fair, tenants = make_fair()
    groups = places(tenants, few=1, many=6)
    newcomer = make_group(tenants, "few", arrival=99)
    assert list(fair.yielding(newcomer, groups)) == groups[:2:-1]
    assert list(fair.yielding(make_group(tenants, "many", arrival=99), groups)) == []


def test_places_count_by_weight() -> None:
    fair, tenants = make_fair(heavy=3.0)
    groups = places(tenants, light=2, heavy=5)
    assert list(fair.yielding(make_group(tenants, "light", arrival=99), groups)) == []
    groups = places(tenants, light=4, heavy=2)
    newcomer = make_group(tenants, "heavy", arrival=99)
    assert list(fair.yielding(newcomer, groups)) == groups[3:0:-1]


def test_who_has_left_does_not_go_ahead_of_the_one_it_left_for() -> None:
    fair, tenants = make_fair(a=1.0, b=2.0, c=0.7)
    for numbers in ({"a": 1, "b": 5, "c": 2}, {"a": 3, "b": 3}, {"a": 0, "b": 4, "c": 4}):
        groups = places(tenants, **numbers)
        newcomer = make_group(tenants, "a", arrival=99)
        for victim in fair.yielding(newcomer, groups):
            victim.num_running = 0
            newcomer.num_running = 1
            assert newcomer not in fair.yielding(victim, [*groups, newcomer])
            newcomer.num_running = 0


@pytest.mark.parametrize("tenant", ["calm", "flood"])
def test_only_a_tenants_own_request_that_waits_there_keeps_a_later_one_from_preempting(
    tenant: str,
) -> None:
    driver = make_driver(policy=PolicyName.FAIR, max_num_seqs=3, max_num_batched_tokens=4)
    for prompt in ([1] * 4, [2] * 6):
        driver.submit(prompt=prompt, max_tokens=9, tenant="flood")
        driver.step("g0")
    driver.submit(prompt=[3] * 3, max_tokens=9, tenant=tenant)
    plan = driver.schedule("g0")
    assert plan is not None
    assert not plan.new_sequences, "it has the last place, but no token of this step is left"
    driver.deliver("g0")
    driver.submit(prompt=[4] * 2, max_tokens=9, tenant="calm")
    plan = driver.schedule("g0")
    assert plan is not None
    expected = [3] * 3 if tenant == "calm" else [4] * 2
    assert plan.new_sequences[0].token_ids == expected
    driver.deliver("g0")
    driver.run_until_idle()
    driver.check_empty()
