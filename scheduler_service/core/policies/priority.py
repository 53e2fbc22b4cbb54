"""Strict priorities."""

from collections.abc import Iterable, Iterator

from scheduler_service.core.policies.policy import Policy
from scheduler_service.core.request import Request
from scheduler_service.core.sequence import SequenceGroup


class Priority(Policy):
    """Lower numbers first; among equal ones in the order of arrival."""

    goes_ahead = True

    @staticmethod
    def rank(request: Request, arrival: tuple[int, int]) -> tuple[int, ...]:
        """The request's priority, then its arrival."""
        return (request.priority, *arrival)

    def yielding(
        self, group: SequenceGroup, others: Iterable[SequenceGroup]
    ) -> Iterator[SequenceGroup]:
        """Those with higher numbers, the last first. Equal ones never yield to each other."""
        higher = (o for o in others if o.request.priority > group.request.priority)
        return iter(sorted(higher, key=lambda other: other.rank, reverse=True))
