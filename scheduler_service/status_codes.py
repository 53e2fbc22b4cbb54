"""Our errors as gRPC statuses and back; the only place that knows both.

Every status carries `google.rpc` details: an `ErrorInfo` always, a `BadRequest` that names the
field for `InvalidArgument`, and a `RetryInfo` when the error tells a delay.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from scheduler_service import errors

logger = logging.getLogger(__name__)

DOMAIN = "pagewire"
DETAILS_KEY = "grpc-status-details-bin"

MAX_MESSAGE_CHARS = 1000
"""A message travels twice in the trailers, which peers limit to a few KiB."""

STATUS_CODES: dict[type[errors.PagewireError], grpc.StatusCode] = {
    errors.PagewireError: grpc.StatusCode.INTERNAL,
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.PromptTooLong: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UnsupportedByModel: grpc.StatusCode.FAILED_PRECONDITION,
    errors.QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.TenantLimit: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineUnreachable: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnknownModel: grpc.StatusCode.NOT_FOUND,
    errors.UnknownRequest: grpc.StatusCode.NOT_FOUND,
    errors.UnknownWorkerGroup: grpc.StatusCode.NOT_FOUND,
    errors.DuplicateRequest: grpc.StatusCode.ALREADY_EXISTS,
    errors.RequestTakenOver: grpc.StatusCode.ABORTED,
    errors.RequestAborted: grpc.StatusCode.CANCELLED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.GenerationFailed: grpc.StatusCode.INTERNAL,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
}

_BY_REASON = {error_class.reason: error_class for error_class in STATUS_CODES}
_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


def status_code(error: Exception) -> grpc.StatusCode:
    """The code of `error`; whatever is not ours is INTERNAL."""
    if isinstance(error, errors.PagewireError):
        return STATUS_CODES[type(error)]
    return grpc.StatusCode.INTERNAL


def to_status(error: Exception) -> status_pb2.Status:
    """`error` with its details.

    An error that is not ours is a bug: its text may hold anything, so callers see none of it.
    """
    if not isinstance(error, errors.PagewireError):
        error = errors.PagewireError("internal error")
    status = status_pb2.Status(
        code=status_code(error).value[0], message=error.message[:MAX_MESSAGE_CHARS]
    )
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.details)
    details: list[Any] = [info]
    if isinstance(error, errors.InvalidArgument):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.expected[:MAX_MESSAGE_CHARS]
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_delay_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMicroseconds(round(error.retry_delay_s * 1e6))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    """End the call with the status of `error`; raises what gRPC raises for it."""
    status = to_status(error)
    trailers = ((DETAILS_KEY, status.SerializeToString()),)
    await context.abort(_BY_NUMBER[status.code], status.message, trailing_metadata=trailers)
    raise AssertionError("abort returned")


@asynccontextmanager
async def errors_as_statuses(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Around a handler's body: what it raises ends the call with the right status.

    An error that is not ours is a bug; its traceback stays in our log.
    """
    try:
        yield
    except (grpc.aio.AbortError, asyncio.CancelledError):
        raise
    except errors.PagewireError as error:
        await abort(context, error)
    except DecodeError:
        expected = "expected messages of the method's type"
        await abort(context, errors.InvalidArgument("request", expected))
    except Exception as error:
        logger.exception("unexpected error in a call")
        await abort(context, error)


def from_failed(
    code: int,
    reason: str,
    message: str,
    details: Mapping[str, str],
    retry_delay_s: float | None = None,
) -> errors.PagewireError:
    """The error that another of our processes reported field by field.

    Its class is the one with this reason, else the first with this code.
    """
    error_class = _BY_REASON.get(reason) or _class_of_code(code)
    if error_class is errors.InvalidArgument:
        field = details.get("field", "request")
        return errors.InvalidArgument(field, message.removeprefix(f"{field}: "))
    return error_class(message, reason=reason, details=details, retry_delay_s=retry_delay_s)


def _class_of_code(number: int) -> type[errors.PagewireError]:
    code = _BY_NUMBER.get(number, grpc.StatusCode.INTERNAL)
    return next(
        (cls for cls, of_cls in STATUS_CODES.items() if of_cls is code), errors.PagewireError
    )
