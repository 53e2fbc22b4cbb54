"""Errors that every service may raise; each service derives its own from them.

    PagewireError
    ├── InvalidArgument        a field is invalid, regardless of the service's state
    ├── DeadlineExceeded       the time for it is up
    └── Unauthenticated        no or wrong credentials

    CannotListen               an address cannot be listened on; an error of a process
    TooFewThreads              the system gives a process too few threads

Nothing here depends on gRPC: `service_common/grpc_status.py` maps each class to a status code.
"""

import re
from collections.abc import Mapping


class PagewireError(Exception):
    """The root: a human-readable message, and a constant reason and details for programs."""

    reason = "INTERNAL"

    def __init_subclass__(cls, reason: str | None = None) -> None:
        """`reason`: the class's; by default its name in capitals."""
        cls.reason = reason or re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).upper()

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        details: Mapping[str, object] | None = None,
        retry_delay_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        if reason is not None:
            self.reason = reason
        self.details = {key: str(value) for key, value in (details or {}).items()}
        self.retry_delay_s = retry_delay_s


class InvalidArgument(PagewireError, reason="INVALID_FIELD"):
    """A field of the request is invalid; `field` is its name in the proto."""

    def __init__(self, field: str, expected: str) -> None:
        super().__init__(f"{field}: {expected}", details={"field": field})
        self.field = field
        self.expected = expected


class DeadlineExceeded(PagewireError):
    """The request's deadline has passed."""


class Unauthenticated(PagewireError):
    """The caller's credentials are missing or wrong."""


class CannotListen(Exception):
    """The address is in use, or this process may not listen on it."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"cannot listen on {address}: {why}")


class TooFewThreads(Exception):
    """The system does not let this process start the threads that it needs."""

    def __init__(self, count: int, needed: int) -> None:
        super().__init__(
            f"cannot start {needed} threads, only {count}: raise the limit of the user's processes"
            " (ulimit -u) or the container's limit of them"
        )
