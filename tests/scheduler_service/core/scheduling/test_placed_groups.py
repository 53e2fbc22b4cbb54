"""The queues of a worker group, and the request that preempts others there."""

import pytest

from scheduler_service.core.config import TenantConfig
from scheduler_service.core.scheduling.placed_groups import PlacedGroups
from scheduler_service.core.sequence import SequenceGroup
from scheduler_service.core.tenants import Tenants
from tests.support.tenants import make_group


@pytest.fixture
def preempting() -> tuple[PlacedGroups, SequenceGroup]:
    """A request that preempts others as soon as it starts."""
    placed, group = PlacedGroups(), make_group(Tenants(TenantConfig(), {}), "")
    group.placement.is_preempting = True
    placed.add(group)
    placed.enqueue(group)
    return placed, group


def test_a_request_that_leaves_before_it_preempts_waits_nowhere(
    preempting: tuple[PlacedGroups, SequenceGroup],
) -> None:
    placed, group = preempting
    assert (group in placed.preempting, placed.num_waiting_sequences) == (True, 1)
    placed.remove(group)
    assert (group in placed.preempting, placed.num_waiting_sequences) == (False, 0)
    assert not placed.seq_groups


def test_the_other_choices_of_a_request_that_has_started_wait_with_other_requests(
    preempting: tuple[PlacedGroups, SequenceGroup],
) -> None:
    placed, group = preempting
    placed.settle_preempting()
    assert (group in placed.preempting, group in placed.waiting) == (True, False)
    group.num_running = 1
    placed.settle_preempting()
    assert (group in placed.preempting, group in placed.waiting) == (False, True)
