"""The order of requests that wait for a worker group."""

from scheduler_service.core.config import TenantConfig
from scheduler_service.core.policies.fair import Fair
from scheduler_service.core.policies.policy import FirstComeFirstServed
from scheduler_service.core.request_queue import ModelQueue
from scheduler_service.core.sequence import SequenceGroup
from scheduler_service.core.tenants import Tenants
from tests.support.tenants import make_group


def one_kind(group: SequenceGroup) -> None:
    """All may go to the same worker groups."""
    del group


LIMITED = {"limited": TenantConfig(max_kv_blocks=1)}


def drain(lanes: ModelQueue) -> list[SequenceGroup]:
    """All groups in the order in which they are served."""
    groups = []
    while (head := lanes.head()) is not None:
        lanes.discard(head)
        lanes.check()
        groups.append(head)
    return groups


def test_queues_of_limited_tenants_do_not_change_the_order_of_ranks() -> None:
    tenants = Tenants(TenantConfig(), LIMITED)
    names = ["", "limited", "other", "limited", ""]
    groups = [make_group(tenants, name, arrival=i) for i, name in enumerate(names)]
    lanes = ModelQueue(FirstComeFirstServed(tenants), one_kind)
    for group in [groups[3], groups[0], groups[4], groups[2], groups[1]]:
        lanes.add(group)
        lanes.check()
    assert drain(lanes) == groups


def test_a_lane_that_is_set_aside_holds_up_nobody_and_comes_back() -> None:
    tenants = Tenants(TenantConfig(), LIMITED)
    lanes = ModelQueue(FirstComeFirstServed(tenants), one_kind)
    first = make_group(tenants, "limited", arrival=1)
    second = make_group(tenants, "", arrival=2)
    third = make_group(tenants, "limited", arrival=0)
    for group in (first, second):
        lanes.add(group)
    lanes.skip_tenant_limited(first)
    lanes.add(third)
    assert lanes.head() is second
    lanes.check()
    lanes.retry_tenant_limited()
    assert drain(lanes) == [third, first, second]


def test_a_lane_that_was_set_aside_is_looked_at_once_its_tenant_has_less() -> None:
    tenants = Tenants(TenantConfig(), LIMITED)
    lanes = ModelQueue(FirstComeFirstServed(tenants), one_kind)
    group = make_group(tenants, "limited")
    group.tenant.num_kv_blocks = 3
    lanes.add(group)
    lanes.skip_tenant_limited(group)
    for num_blocks, head in ((3, None), (4, None), (2, group)):
        group.tenant.num_kv_blocks = num_blocks
        lanes.retry_tenant_limited()
        lanes.check()
        assert lanes.head() is head
    lanes.skip_tenant_limited(group)
    lanes.reorder()
    assert lanes.head() is group


def test_a_lane_that_empties_while_set_aside_is_gone() -> None:
    tenants = Tenants(TenantConfig(), LIMITED)
    lanes = ModelQueue(FirstComeFirstServed(tenants), one_kind)
    group = make_group(tenants, "limited")
    lanes.add(group)
    lanes.skip_tenant_limited(group)
    lanes.discard(group)
    lanes.retry_tenant_limited()
    lanes.check()
    assert lanes.head() is None
    assert not lanes


def test_the_order_of_queues_follows_what_tenants_are_served_meanwhile() -> None:
    tenants = Tenants(TenantConfig(), {})
    fair = Fair(tenants)
    lanes = ModelQueue(fair, one_kind)
    one, other = make_group(tenants, "one", arrival=1), make_group(tenants, "other", arrival=2)
    for group in (one, other):
        lanes.add(group)
    assert lanes.head() is one
    fair.note_tokens(one.sequences)
    assert lanes.head() is other
    fair.note_tokens(other.sequences * 2)
    assert lanes.head() is one


def test_tokens_before_a_group_are_those_of_its_lane_with_lower_ranks() -> None:
    tenants = Tenants(TenantConfig(), LIMITED)
    lanes = ModelQueue(FirstComeFirstServed(tenants), one_kind)
    for arrival, name in enumerate(["", "limited", "other", ""]):
        lanes.add(make_group(tenants, name, num_prompt_tokens=10**arrival, arrival=arrival))
    assert lanes.num_tokens == 1111
    assert lanes.num_tokens_before(make_group(tenants, "any", arrival=3)) == 101


def test_what_is_passed_over_or_left_out_comes_back_to_its_place() -> None:
    tenants = Tenants(TenantConfig(), {})
    lanes = ModelQueue(FirstComeFirstServed(tenants), lambda group: group.num_prompt_tokens)
    groups = [make_group(tenants, "", num_prompt_tokens=1 + i % 2, arrival=i) for i in range(6)]
    for group in groups:
        lanes.add(group)
    lanes.skip(groups[0])
    assert lanes.head() is groups[1]
    lanes.skip_queue(groups[1])
    assert lanes.head() is groups[2]
    lanes.discard(groups[2])
    lanes.skip(groups[4])
    assert lanes.head() is None
    lanes.end_round()
    lanes.check()
    assert drain(lanes) == [groups[0], groups[1], groups[3], groups[4], groups[5]]


def test_groups_that_are_passed_over_may_end_meanwhile() -> None:
    tenants = Tenants(TenantConfig(), {})
    lanes = ModelQueue(FirstComeFirstServed(tenants), one_kind)
    groups = [make_group(tenants, "", arrival=i) for i in range(2)]
    for group in groups:
        lanes.add(group)
    for group in groups:
        lanes.skip(group)
    for group in groups:
        assert group in lanes
        lanes.discard(group)
    lanes.end_round()
    lanes.check()
    assert not lanes


def test_sorting_anew_changes_neither_order_nor_sums() -> None:
    tenants = Tenants(TenantConfig(), LIMITED)
    divisor = 1
    lanes = ModelQueue(FirstComeFirstServed(tenants), lambda group: group.rank[0] % divisor)
    names = ["", "limited", "other", "limited", "", ""]
    groups = [make_group(tenants, name, arrival=i) for i, name in enumerate(names)]
    for group in groups:
        lanes.add(group)
    divisor = 3
    lanes.reorder()
    lanes.check()
    assert sum(group.tenant.num_queued_tokens for group in groups) == len(groups)
    assert drain(lanes) == groups


def test_a_tenant_with_requests_of_two_kinds_is_lifted_once() -> None:
    tenants = Tenants(TenantConfig(), {})
    fair = Fair(tenants)
    lanes = ModelQueue(fair, lambda group: group.num_prompt_tokens)
    poor = make_group(tenants, "poor", arrival=1)
    rich = make_group(tenants, "rich", arrival=2)
    for group in (poor, rich):
        lanes.add(group)
    fair.note_tokens(rich.sequences * 5)
    second = make_group(tenants, "poor", num_prompt_tokens=2, arrival=3)
    lanes.add(second)
    assert [lanes.head(), lanes.num_tokens_before(second)] == [poor, 0]
    lanes.discard(poor)
    assert lanes.head() is second, "its tenant is still the one with the least service"
