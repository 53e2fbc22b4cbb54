"""The interface of scheduling policies, and the two that keep no state.

These are `Policy` itself, first come, first served, and strict priorities.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Rows
from typing import Any, ClassVar

from scheduler_service.core.config import WorkKind
from scheduler_service.core.request import Request
from scheduler_service.core.sequence import Sequence, SequenceGroup
from scheduler_service.core.tenants import Tenants, TenantUsage

POOLED_TOKEN_US = 50
"""Time by which a text that is pooled yields to others for each of its tokens."""


def in_order_of_arrival(request: Request, arrival: tuple[int, int]) -> tuple[int, int]:
    """The order of arrival, but that a text that is pooled counts as if it had arrived later by
    `POOLED_TOKEN_US` for each of its tokens.

    So of texts that arrive together the shortest is first; none waits for a longer one unless that
    has waited longer, by the difference; and one of n tokens precedes all that arrives n times
    `POOLED_TOKEN_US` after it, however short."""
    if request.work.kind is not WorkKind.POOLING:
        return arrival
    return arrival[0] + POOLED_TOKEN_US * len(request.prompt_token_ids), arrival[1]


class Policy:
    """The order in which one model's requests are served: first come, first served, unless a
    subclass says otherwise.

    Each request has a constant rank: its order within its queue, and within a worker group's
    batch, of which the last is preempted when memory runs out. Requests that wait for a worker
    group are split into queues, and only the head of a queue can be next; `key` orders the heads.
    Methods with a default here are the same for all policies that do not override them.
    """

    preempts: ClassVar = False
    """Whether some requests may preempt others."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    @staticmethod
    def rank(request: Request, arrival: tuple[int, int]) -> tuple[int, ...]:
        """The request's constant place, the lowest first. `arrival` is when it came to its
        frontend, in microseconds, and a number that counts up; it must be part of the rank, so
        that no two are equal."""
        return in_order_of_arrival(request, arrival)

    def queue_name(self, tenant: TenantUsage) -> str | None:
        """The queue of a tenant's requests; None is the one that tenants share.

        A tenant whose requests may have to wait for its own limit on KV memory has a queue of its
        own, so that they do not hold up other tenants.
        """
        return None if tenant.config.max_kv_blocks is None else tenant.name

    def key(self, head: SequenceGroup) -> Any:
        """Sort key of the queue whose head is given; the lowest is served first. It must not
        decrease while the group is the head."""
        return head.rank

    def precedes(self, waiting: SequenceGroup, seq_group: SequenceGroup) -> bool:
        """Whether a group that waits in a worker group must start before `seq_group`, which is not
        there yet, may preempt others there."""
        return waiting.rank < seq_group.rank

    def yielding(
        self, seq_group: SequenceGroup, others: Iterable[SequenceGroup]
    ) -> Iterator[SequenceGroup]:
        """The others in a worker group that a waiting group may preempt if it finds no room
        otherwise, the first to be preempted first.

        A preempted group must not be able to preempt the one that it was preempted for.
        """
        del seq_group, others
        return iter(())

    def open_queue(self, tenant: TenantUsage, first: SequenceGroup | None) -> None:
        """Record that a tenant's request joins a queue that was empty, or that was held up by the
        tenant's own limits; `first` would be next otherwise."""
        del tenant, first

    def close_queue(self, tenant: TenantUsage) -> None:
        """Record that a queue is empty; the last to leave it was a request of this tenant."""
        del tenant

    def record_placed(self, seq_group: SequenceGroup) -> None:
        """Record that a request is about to be placed in a worker group, for the first time or
        again."""
        del seq_group

    def record_tokens(self, rows: Rows[Sequence]) -> None:
        """Account for a step's result, with a token for each of these sequences."""
        del rows


class Priority(Policy):
    """Lower numbers first; equal numbers in the order of arrival."""

    preempts = True

    @staticmethod
    def rank(request: Request, arrival: tuple[int, int]) -> tuple[int, ...]:
        """The request's priority, then its arrival."""
        return (request.priority, *in_order_of_arrival(request, arrival))

    def yielding(
        self, seq_group: SequenceGroup, others: Iterable[SequenceGroup]
    ) -> Iterator[SequenceGroup]:
        """Groups with higher numbers, the latest first; equal ones never yield to each other."""
        higher = (o for o in others if o.request.priority > seq_group.request.priority)
        return iter(sorted(higher, key=lambda other: other.rank, reverse=True))
