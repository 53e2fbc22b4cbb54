"""Who is served first: the order in which groups are admitted, and kept when memory runs out."""

from typing import Protocol

from scheduler_service.core.request import Request


class Policy(Protocol):
    """Ranks requests. The lowest rank is admitted first and preempted last."""

    def rank(self, request: Request, arrival: int) -> tuple[int, ...]:
        """The request's place for life. `arrival` counts up by one per accepted request and
        must be part of the rank, so that no two are equal."""


class FirstComeFirstServed:
    """In the order of arrival."""

    def rank(self, request: Request, arrival: int) -> tuple[int, ...]:
        """The arrival alone."""
        del request
        return (arrival,)
