"""What can go wrong in any service, in our own words; each service's tree grows from here.

    PagewireError
    ├── InvalidArgument        a field is wrong, whatever our state
    ├── DeadlineExceeded       the time for it is up
    └── Unauthenticated        no or wrong credentials

    CannotListen               an address is taken, or not ours: no call's error, but a process's

Nothing here knows gRPC: `service_common/grpc_status.py` maps each class to a status code.
"""

from collections.abc import Mapping


class PagewireError(Exception):
    """The root: a message for people, a constant reason and numbers for programs."""

    reason = "INTERNAL"

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


class InvalidArgument(PagewireError):
    """A field of the request is wrong; `field` names it as the proto does."""

    reason = "INVALID_FIELD"

    def __init__(self, field: str, expected: str) -> None:
        super().__init__(f"{field}: {expected}", details={"field": field})
        self.field = field
        self.expected = expected


class DeadlineExceeded(PagewireError):
    """The request's deadline has passed."""

    reason = "DEADLINE_EXCEEDED"


class Unauthenticated(PagewireError):
    """The caller's credentials are missing or wrong."""

    reason = "UNAUTHENTICATED"


class CannotListen(Exception):
    """The address is taken, or not ours to listen on."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"cannot listen on {address}: {why}")
