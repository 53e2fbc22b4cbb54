"""Strict priorities."""

from scheduler_service.core.policies.policy import Policy
from scheduler_service.core.request import Request


class Priority(Policy):
    """Lower numbers first; among equal ones in the order of arrival."""

    @staticmethod
    def rank(request: Request, arrival: int) -> tuple[int, ...]:
        """The request's priority, then its arrival."""
        return (request.priority, arrival)
