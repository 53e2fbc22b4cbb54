"""Typed exceptions.

    PagewireError
    ├── InvalidArgument      (ValueError)       the request is invalid; `field` names the field
    ├── FailedPrecondition                      this deployment cannot serve it (prompt too long)
    ├── NotAuthorized        (PermissionError)  the API key is missing, wrong or not allowed
    ├── NotFound             (LookupError)      no such model or request
    ├── AlreadyExists                           a live request has this id
    ├── Overloaded                              queues are full; retry after `retry_delay_s`
    ├── RequestAborted                          the request was aborted
    ├── DeadlineExceeded     (TimeoutError)     the timeout passed
    ├── Unavailable          (ConnectionError)  no server, or the connection broke
    ├── ServerError                             an error in the server
    └── LocalServiceError    (RuntimeError)     a service started by this process failed

Each carries the server's constant `reason`, such as PROMPT_TOO_LONG, and its `details`.
"""

import math
from collections.abc import Mapping
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from pagewire.connection_errors import in_words

_DETAILS_KEY = "grpc-status-details-bin"


class PagewireError(Exception):
    """The root: a human-readable message, and the server's details for programs."""

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        field: str = "",
        details: Mapping[str, str] | None = None,
        retry_delay_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        """The server's constant reason; empty if the error does not come from the server."""
        self.field = field
        """The invalid field of the request, as named in the protos; empty if there is none."""
        self.details = dict(details or {})
        self.retry_delay_s = retry_delay_s
        """Seconds after which the server asks for a retry."""
        self.was_connected = True
        """False if no connection could be made to any server since the client exists."""
        self.addresses: tuple[str, ...] = ()
        """The addresses that were tried, if no server could be reached at any."""
        self.progressed_at = -math.inf
        """When the client last received anything for a request, on the monotonic clock."""


class InvalidArgument(PagewireError, ValueError):
    """The request is invalid, regardless of the server's state."""


class FailedPrecondition(PagewireError):
    """This deployment cannot serve it: the prompt exceeds its memory, it has no chat template."""


class NotAuthorized(PagewireError, PermissionError):
    """The API key is missing, wrong, or does not allow this."""


class NotFound(PagewireError, LookupError):
    """No such model is served, or no such request is live."""


class AlreadyExists(PagewireError):
    """A live request has this id."""


class Overloaded(PagewireError):
    """The server's queues are full."""


class RequestAborted(PagewireError):
    """The request was aborted; `reason` is TAKEN_OVER if a later attempt continues it elsewhere."""


class DeadlineExceeded(PagewireError, TimeoutError):
    """The request's timeout passed."""


class Unavailable(PagewireError, ConnectionError):
    """No server could be reached, it is shutting down, or the connection broke."""


class ServerError(PagewireError):
    """An error in the server, or an invalid answer."""


class LocalServiceError(PagewireError, RuntimeError):
    """A service that this process started failed, or could not be started."""


_BY_CODE: dict[grpc.StatusCode, type[PagewireError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.OUT_OF_RANGE: InvalidArgument,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.UNIMPLEMENTED: FailedPrecondition,
    grpc.StatusCode.UNAUTHENTICATED: NotAuthorized,
    grpc.StatusCode.PERMISSION_DENIED: NotAuthorized,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.CANCELLED: RequestAborted,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.ABORTED: RequestAborted,
}
"""Error types by the code of a call's status; `ServerError` for all others."""
_BY_NUMBER = {code.value[0]: error for code, error in _BY_CODE.items()}

# The service gives every error a reason. An error without one, and with these codes and words,
# comes from the transport: the server was killed, or cancelled its calls after its grace period.
_TRANSPORT_BREAKS = {
    grpc.StatusCode.CANCELLED.value[0]: ("",),
    grpc.StatusCode.UNKNOWN.value[0]: ("Stream removed",),
    # grpc.aio reports the second one if it was writing when the call ended.
    grpc.StatusCode.INTERNAL.value[0]: ("RST_STREAM", "Internal error from Core"),
}

_NO_ANSWER = ("failed to connect to all addresses", "DNS resolution failed", "errors resolving")
"""The beginnings of gRPC's messages for failed connections."""
_TOO_LARGE = ("SERVER: Received message larger", "CLIENT: Sent message larger")
"""The beginnings of gRPC's messages for requests that are larger than a limit, with the code of a
full server."""
_TIMEOUT_PASSED = "the timeout passed before the answer was complete"


def from_call(error: grpc.RpcError) -> PagewireError:
    """The typed exception for a failed call, sync or asyncio."""
    metadata = dict(error.trailing_metadata() or ())
    status = status_pb2.Status()
    code = error.code().value[0]
    details = error.details() or ""
    failure = _build(code, in_words(details), _parse(metadata.get(_DETAILS_KEY, b""), status))
    failure.was_connected = not details.startswith(_NO_ANSWER)
    return failure


def from_status(code: int, message: str, status: bytes) -> PagewireError:
    """The typed exception for a failed request on a stream of many."""
    return _build(code, message, _parse(status, status_pb2.Status()))


def _parse(data: str | bytes, status: status_pb2.Status) -> status_pb2.Status:
    try:
        status.ParseFromString(data if isinstance(data, bytes) else data.encode())
    except DecodeError:
        status.Clear()  # Perhaps from a proxy; code and message suffice.
    return status


def _build(code: int, message: str, status: status_pb2.Status) -> PagewireError:
    info = _detail(status, error_details_pb2.ErrorInfo())
    bad_request = _detail(status, error_details_pb2.BadRequest())
    retry = _detail(status, error_details_pb2.RetryInfo())
    kind = _BY_NUMBER.get(code, ServerError)
    if info is None and any(words in message for words in _TRANSPORT_BREAKS.get(code, ())):
        kind = Unavailable
    if info is None and message.startswith(_TOO_LARGE):
        kind = InvalidArgument
    if info is None and kind is DeadlineExceeded:
        message = _TIMEOUT_PASSED
    violations = bad_request.field_violations if bad_request else ()
    return kind(
        message,
        reason=info.reason if info else "",
        field=violations[0].field if violations else "",
        details=info.metadata if info else None,
        retry_delay_s=retry.retry_delay.ToMilliseconds() / 1000 if retry else None,
    )


_Detail = TypeVar("_Detail", bound=Message)


def _detail(status: status_pb2.Status, wanted: _Detail) -> _Detail | None:
    """`wanted` filled from the first detail of its type; None without one."""
    for detail in status.details:
        if detail.Is(wanted.DESCRIPTOR) and detail.Unpack(wanted):
            return wanted
    return None
