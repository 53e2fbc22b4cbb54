"""Errors as gRPC statuses: each service has a table of codes, and this makes statuses of it.

Every status carries `google.rpc` details: an `ErrorInfo` always, a `BadRequest` that names the
field for `InvalidArgument`, and a `RetryInfo` when the error tells a delay.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2

from service_common import errors

if TYPE_CHECKING:  # and where a status is made: the codes alone do without
    from google.rpc import status_pb2

DOMAIN = "pagewire"
DETAILS_KEY = "grpc-status-details-bin"

MAX_TEXT_BYTES, MAX_DETAIL_BYTES = 1000, 500
"""Of a message, which travels twice in the trailers, and of each of an error's details, which may
hold what a caller has sent. Peers take 8 KiB of trailers, in which a byte that is not ASCII takes
three."""

COMMON_CODES: Mapping[type[errors.PagewireError], grpc.StatusCode] = {
    errors.PagewireError: grpc.StatusCode.INTERNAL,
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
}


class Statuses:
    """What callers are told of errors."""

    def __init__(self, codes: Mapping[type[errors.PagewireError], grpc.StatusCode]) -> None:
        """`codes`: of every class of error that may end a call."""
        self._codes = codes

    def code(self, error: Exception) -> grpc.StatusCode:
        """The code of `error`; whatever is not ours is INTERNAL."""
        if isinstance(error, errors.PagewireError):
            return self._codes[type(error)]
        return grpc.StatusCode.INTERNAL

    def status(self, error: Exception) -> "status_pb2.Status":
        """`error` with its details.

        An error that is not ours is a bug: its text may hold anything, so callers see none of it.
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
        with unless_over():
            await context.abort(self.code(error), status.message, trailing_metadata=trailers)
        raise AssertionError("abort returned")


@contextmanager
def unless_over() -> Iterator[None]:
    """Around what a call's handler does with its context: a call that is over is cancelled.

    Its caller may go at the very moment in which something is written to it, before gRPC has
    cancelled the handler. Then the write fails, which is nobody's error.
    """
    try:
        yield
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


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
    """The text, or what of it goes into so many bytes."""
    return text.encode(errors="backslashreplace")[:most].decode(errors="ignore")


COMMON = Statuses(COMMON_CODES)
"""For what refuses calls before they reach a service."""
