"""Errors that end the core's session with a worker group."""

from collections.abc import Sequence


class SessionFailed(Exception):
    """The connection to a worker broke, or the worker violates the contract."""


class StepOverdue(SessionFailed):
    """A step takes much longer than expected although the worker sends heartbeats."""

    def __init__(self, step_id: int, limit_s: float) -> None:
        super().__init__(f"step {step_id} is overdue: not all results within {limit_s:.3g} s")
        self.limit_s = limit_s


class GroupHung(Exception):
    """The group cannot be used until its `ranks` have registered again."""

    def __init__(self, reason: str, ranks: Sequence[int]) -> None:
        super().__init__(reason)
        self.ranks = ranks


class CannotServe(Exception):
    """The worker is healthy, but this core can never use it; a retry would not help."""


class WorkerTakenOver(Exception):
    """Another core has taken over the worker."""
