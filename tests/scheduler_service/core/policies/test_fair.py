"""Fair shares, in simulated time and account by account."""

from dataclasses import replace
from itertools import combinations

import pytest

from benchmarks import fairness
from benchmarks.fairness import CONFIG, GROUP, Arrival, CostModel, Simulation
from scheduler_service.core import PolicyName, TenantConfig
from scheduler_service.core.policies.fair import Fair
from scheduler_service.core.sequence import SequenceGroup
from scheduler_service.core.tenants import Tenants
from tests.support.core_driver import CoreDriver, make_capacity, make_driver
from tests.support.tenants import make_group


def test_saturated_tenants_get_shares_by_weight_within_five_percent() -> None:
    shares = fairness.shares(PolicyName.FAIR, until=30.0)
    for tenant, due in fairness.due_shares().items():
        assert shares[tenant] == pytest.approx(due, rel=0.05)


def test_a_flood_makes_a_calm_tenant_wait_at_most_half_as_long_again() -> None:
    assert fairness.slowdown(PolicyName.FAIR, until=60.0) <= 1.5


def test_first_come_first_served_lets_a_calm_tenant_wait_for_the_flood() -> None:
    assert fairness.slowdown(PolicyName.FCFS, until=60.0) > 10


def test_first_come_first_served_gives_no_shares_by_weight() -> None:
    shares = fairness.shares(PolicyName.FCFS, until=30.0)
    assert shares["a"] > 2 * fairness.due_shares()["a"]


def most_apart(policy: PolicyName, seed: int) -> float:
    """The greatest difference in service per weight among tenants who all have requests waiting,
    in units of what the policy's docstring allows."""
    weights = {"a": 1.0, "b": 1.0, "c": 2.5}
    config = replace(
        CONFIG,
        policy=policy,
        max_num_seqs=8,
        tenants={name: TenantConfig(weight=weight) for name, weight in weights.items()},
    )
    group = replace(GROUP, num_gpu_blocks=256)
    simulation = Simulation(config, CostModel(), group)
    # Each has more than it can be served, and they come one tenant after the other.
    arrivals = [
        Arrival(
            time=0.001 * number,
            tenant=name,
            num_prompt_tokens=50 + (seed * 37 + i * i * 13) % (700 if name == "a" else 300),
            num_output_tokens=1 + (seed * 11 + i * 7) % (200 if name == "b" else 60),
        )
        for number, name in enumerate(weights)
        for i in range(200)
    ]
    longest_prompt = max(arrival.num_prompt_tokens for arrival in arrivals)
    most = 2 * max(longest_prompt, 2 * group.num_cache_tokens) / min(weights.values())
    apart = 0.0
    for i in range(30):
        simulation.run(arrivals if i == 0 else [], until=0.5 * (i + 1))
        service = simulation.service()
        for one, other in combinations(weights, 2):
            difference = service[one] / weights[one] - service[other] / weights[other]
            apart = max(apart, abs(difference) / most)
    return apart


@pytest.mark.parametrize("seed", range(3))
def test_the_difference_in_service_stays_within_the_bound(seed: int) -> None:
    assert most_apart(PolicyName.FAIR, seed) <= 1.0


def test_first_come_first_served_exceeds_the_bound() -> None:
    assert most_apart(PolicyName.FCFS, 0) > 1.0


# Accounts.


def make_fair(**weights: float) -> tuple[Fair, Tenants]:
    tenants = Tenants(
        TenantConfig(), {name: TenantConfig(weight=weight) for name, weight in weights.items()}
    )
    return Fair(tenants), tenants


def test_prompts_are_charged_once_and_outputs_twice_their_number_by_weight() -> None:
    fair, tenants = make_fair(heavy=4.0)
    group = make_group(tenants, "heavy", num_prompt_tokens=100)
    fair.note_placed(group)
    fair.note_placed(group)
    assert fair.key(group)[0] == 25
    fair.note_tokens(group.sequences * 10)
    assert fair.key(group)[0] == 30


def test_who_comes_back_is_lifted_to_those_who_wait_but_never_lowered() -> None:
    fair, tenants = make_fair()
    busy, idle = make_group(tenants, "busy", num_prompt_tokens=70), make_group(tenants, "idle")
    fair.open_queue(busy.tenant, None)
    fair.note_placed(busy)
    fair.open_queue(idle.tenant, busy)
    assert fair.key(idle)[0] == fair.key(busy)[0] == 70
    fair.note_tokens(idle.sequences * 40)
    fair.open_queue(idle.tenant, busy)
    assert fair.key(idle)[0] == 150


def test_where_nobody_waits_who_comes_back_is_lifted_to_the_last_who_did() -> None:
    fair, tenants = make_fair()
    last, new = make_group(tenants, "last", num_prompt_tokens=70), make_group(tenants, "new")
    fair.note_placed(last)
    fair.close_queue(last.tenant)
    fair.note_tokens(last.sequences * 5)
    fair.open_queue(new.tenant, None)
    assert fair.key(new)[0] == 80


def test_accounts_of_tenants_that_are_gone_are_forgotten_unless_they_had_more() -> None:
    fair, tenants = make_fair()
    for i in range(1000):
        group = make_group(tenants, f"passing{i}", num_prompt_tokens=10)
        tenants.add_request(group.tenant, i)
        fair.open_queue(group.tenant, None)
        fair.note_placed(group)
        fair.close_queue(group.tenant)
        tenants.remove_request(group.tenant, 10, i)
        if i == 0:
            served_most = make_group(tenants, "most", num_prompt_tokens=50_000)
            fair.note_placed(served_most)
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


def test_a_flood_is_not_served_before_a_newcomer() -> None:
    config = replace(CONFIG, policy=PolicyName.FAIR, max_num_seqs=1, max_num_batched_tokens=16)
    driver = CoreDriver(config)
    driver.add_worker_group(make_capacity())
    flood = [driver.submit(prompt=[1, 2], max_tokens=2, tenant="flood") for _ in range(20)]
    driver.schedule("g0")
    newcomer = driver.submit(prompt=[3, 4], max_tokens=2, tenant="newcomer")
    while newcomer.finished is None:
        driver.schedule("g0")
        driver.deliver("g0")
        driver.collect()
    assert sum(record.finished is not None for record in flood) == 1


@pytest.mark.parametrize("tenant", ["calm", "flood"])
def test_only_a_tenants_own_request_that_waits_there_keeps_a_later_one_from_preempting(
    tenant: str,
) -> None:
    driver = make_driver(policy=PolicyName.FAIR, max_num_seqs=3, max_num_batched_tokens=4)
    for prompt in ([1] * 4, [2] * 6):
        driver.submit(prompt=prompt, max_tokens=9, tenant="flood")
        driver.schedule("g0")
        driver.deliver("g0")
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
