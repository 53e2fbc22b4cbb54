"""The order of requests that wait for a worker group."""

from scheduler_service.core.config import TenantConfig
from scheduler_service.core.policies.fair import Fair
from scheduler_service.core.policies.policy import Policy
from scheduler_service.core.request_queue import ModelQueue
from scheduler_service.core.sequence import SequenceGroup
from scheduler_service.core.tenants import Tenants
from tests.support.tenants import make_group


def one_kind(group: SequenceGroup) -> None:
    """All may go to the same worker groups."""
    del group


LIMITED = {"limited": TenantConfig(max_kv_blocks=1)}


def drain(queue: ModelQueue) -> list[SequenceGroup]:
    """All groups in the order in which they are served."""
    groups = []
    while (head := queue.head()) is not None:
        queue.discard(head)
        queue.check()
        groups.append(head)
    return groups


def test_a_lane_that_was_set_aside_is_looked_at_once_its_tenant_has_less() -> None:
    tenants = Tenants(TenantConfig(), LIMITED)
    queue = ModelQueue(Policy(tenants), one_kind)
    group = make_group(tenants, "limited")
    group.tenant.kv_quota = 3
    queue.add(group)
    queue.skip_tenant_limited(group)
    for kv_quota, head in ((3, None), (4, None), (2, group)):
        group.tenant.kv_quota = kv_quota
        queue.retry_tenant_limited()
        queue.check()
        assert queue.head() is head
    queue.skip_tenant_limited(group)
    queue.reorder()
    assert queue.head() is group


def test_tokens_before_a_group_are_those_of_its_lane_with_lower_ranks() -> None:
    tenants = Tenants(TenantConfig(), LIMITED)
    queue = ModelQueue(Policy(tenants), one_kind)
    for arrival, name in enumerate(["", "limited", "other", ""]):
        queue.add(make_group(tenants, name, num_prompt_tokens=10**arrival, arrival=arrival))
    assert queue.num_tokens == 1111
    assert queue.num_tokens_before(make_group(tenants, "any", arrival=3)) == 101


def test_what_is_passed_over_or_left_out_comes_back_to_its_place() -> None:
    tenants = Tenants(TenantConfig(), {})
    queue = ModelQueue(Policy(tenants), lambda group: group.num_prompt_tokens)
    groups = [make_group(tenants, "", num_prompt_tokens=1 + i % 2, arrival=i) for i in range(6)]
    for group in groups:
        queue.add(group)
    queue.skip(groups[0])
    assert queue.head() is groups[1]
    queue.skip_queue(groups[1])
    assert queue.head() is groups[2]
    queue.discard(groups[2])
    queue.skip(groups[4])
    assert queue.head() is None
    queue.end_round()
    queue.check()
    assert drain(queue) == [groups[0], groups[1], groups[3], groups[4], groups[5]]


def test_sorting_anew_changes_neither_order_nor_sums() -> None:
    tenants = Tenants(TenantConfig(), LIMITED)
    divisor = 1
    queue = ModelQueue(Policy(tenants), lambda group: group.rank[0] % divisor)
    names = ["", "limited", "other", "limited", "", ""]
    groups = [make_group(tenants, name, arrival=i) for i, name in enumerate(names)]
    for group in groups:
        queue.add(group)
    divisor = 3
    queue.reorder()
    queue.check()
    assert sum(group.tenant.num_queued_tokens for group in groups) == len(groups)
    assert drain(queue) == groups


def test_a_tenant_with_requests_of_two_kinds_is_lifted_once() -> None:
    tenants = Tenants(TenantConfig(), {})
    fair = Fair(tenants)
    queue = ModelQueue(fair, lambda group: group.num_prompt_tokens)
    poor = make_group(tenants, "poor", arrival=1)
    rich = make_group(tenants, "rich", arrival=2)
    for group in (poor, rich):
        queue.add(group)
    fair.record_tokens(rich.sequences * 5)
    second = make_group(tenants, "poor", num_prompt_tokens=2, arrival=3)
    queue.add(second)
    assert [queue.head(), queue.num_tokens_before(second)] == [poor, 0]
    queue.discard(poor)
    assert queue.head() is second, "its tenant is still the one with the least service"
