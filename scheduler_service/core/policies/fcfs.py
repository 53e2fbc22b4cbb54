"""First come, first served."""

from scheduler_service.core.policies.policy import Policy
from scheduler_service.core.request import Request


class FirstComeFirstServed(Policy):
    """In the order of arrival."""

    @staticmethod
    def rank(request: Request, arrival: tuple[int, int]) -> tuple[int, ...]:
        """The arrival alone."""
        del request
        return arrival
