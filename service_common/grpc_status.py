"""Errors as gRPC statuses, by each service's table of codes.

Every status carries `google.rpc` details: an `ErrorInfo` always, a `BadRequest` that names the
field for `InvalidArgument`, and a `RetryInfo` when the error has a retry delay.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2

from service_common import errors

if TYPE_CHECKING:  # imported where a status is made: the codes alone do not need it
    from google.rpc import status_pb2

DOMAIN = "pagewire"
DETAILS_KEY = "grpc-status-details-bin"

MAX_TEXT_BYTES, MAX_DETAIL_BYTES = 1000, 500
"""Limit of a message, which the trailers contain twice, and of each of an error's details, which
may contain what a caller has sent. Peers accept 8 KiB of trailers, in which a non-ASCII byte takes
three."""

COMMON_CODES: Mapping[type[errors.PagewireError], grpc.StatusCode] = {
    errors.PagewireError: grpc.StatusCode.INTERNAL,
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
}


class Statuses:
    """Maps errors to the statuses that callers receive."""

    def __init__(self, codes: Mapping[type[errors.PagewireError], grpc.StatusCode]) -> None:
        """`codes`: the status code of each class of error that may end a call."""
        self._codes = codes

    def code(self, error: Exception) -> grpc.StatusCode:
        """The code of `error`; INTERNAL for any other exception."""
        if isinstance(error, errors.PagewireError):
            return self._codes[type(error)]
        return grpc.StatusCode.INTERNAL

    def status(self, error: Exception) -> "status_pb2.Status":
        """The status of `error`, with its details.

        Any other exception is a bug: its text may contain anything, so callers do not see it.
        """
        from google.rpc import status_pb2

        if not isinstance(error, errors.PagewireError):
            error = errors.PagewireError("internal error")
        status = status_pb2.Status(
            code=self.code(error).value[0], message=_cut(error.message, MAX_TEXT_BYTES)
        )
        for detail in _details(error):
            packed = any_pb2.Any()
            packed.Pack(detail)
            status.details.append(packed)
        return status

    async def abort(
        self, context: grpc.aio.ServicerContext[Any, Any], error: Exception
    ) -> NoReturn:
        """End the call with the status of `error`; raises what gRPC raises for it."""
        status = self.status(error)
        trailers = ((DETAILS_KEY, status.SerializeToString()),)
        with cancel_if_ended():
            await context.abort(self.code(error), status.message, trailing_metadata=trailers)
        raise AssertionError("abort returned")


@contextmanager
def cancel_if_ended() -> Iterator[None]:
    """Cancel a call's handler if the call is already over, and only then.

    A caller may disconnect while a response is written, before gRPC has cancelled the handler. The
    write then fails, which is not an error.

    A handler that raises CancelledError although nobody has cancelled it, as it does when something
    that it awaits was cancelled, raises RuntimeError instead: gRPC would give the call no status,
    and its caller would wait for ever.
    """
    try:
        yield
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        raise RuntimeError("what the call was waiting for has been cancelled") from error


def _details(error: errors.PagewireError) -> list[Any]:
    from google.rpc import error_details_pb2

    metadata = {key: _cut(value, MAX_DETAIL_BYTES) for key, value in error.details.items()}
    details: list[Any] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    ]
    if isinstance(error, errors.InvalidArgument):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(error.field, MAX_DETAIL_BYTES),
            description=_cut(error.expected, MAX_TEXT_BYTES),
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_delay_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMicroseconds(round(error.retry_delay_s * 1e6))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return details


def _cut(text: str, most: int) -> str:
    """The text, cut to this many bytes."""
    return text.encode(errors="backslashreplace")[:most].decode(errors="ignore")


COMMON = Statuses(COMMON_CODES)
"""Statuses of interceptors, which refuse calls before they reach a service."""
