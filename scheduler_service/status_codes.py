"""The scheduling side's errors as gRPC statuses and back; the only place that knows both."""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError

from pagewire.connection_errors import in_words
from scheduler_service import errors
from service_common.grpc_status import COMMON_CODES, DETAILS_KEY, Statuses, cancel_if_ended

logger = logging.getLogger(__name__)

STATUS_CODES: dict[type[errors.PagewireError], grpc.StatusCode] = {
    **COMMON_CODES,
    errors.PromptTooLong: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UnsupportedByModel: grpc.StatusCode.FAILED_PRECONDITION,
    errors.QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.TenantLimit: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineUnreachable: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnknownModel: grpc.StatusCode.NOT_FOUND,
    errors.UnknownAdapter: grpc.StatusCode.NOT_FOUND,
    errors.DuplicateAdapter: grpc.StatusCode.ALREADY_EXISTS,
    errors.AdapterRefused: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UnknownRequest: grpc.StatusCode.NOT_FOUND,
    errors.UnknownWorkerGroup: grpc.StatusCode.NOT_FOUND,
    errors.DuplicateRequest: grpc.StatusCode.ALREADY_EXISTS,
    errors.RequestTakenOver: grpc.StatusCode.ABORTED,
    errors.RequestAborted: grpc.StatusCode.CANCELLED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.NoCandidates: grpc.StatusCode.INVALID_ARGUMENT,
    errors.GenerationFailed: grpc.StatusCode.INTERNAL,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
}

_BY_REASON = {error_class.reason: error_class for error_class in STATUS_CODES}
_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


_STATUSES = Statuses(STATUS_CODES)

status_code = _STATUSES.code
to_status = _STATUSES.status
abort = _STATUSES.abort


def malformed_message() -> errors.InvalidArgument:
    """The error of a call with bytes that are no message."""
    return errors.InvalidArgument("request", "expected messages of the method's type")


Rpc = TypeVar("Rpc", bound=Callable[..., Awaitable[Any]])


def rpc(method: Rpc) -> Rpc:
    """A gRPC method; what it raises ends the call, whose context is the last argument.

    An error that is not ours is a bug; its traceback stays in our log.
    """

    @functools.wraps(method)
    async def wrapped(*arguments: Any) -> Any:
        context = arguments[-1]
        try:
            with cancel_if_ended():
                return await method(*arguments)
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except errors.PagewireError as error:
            await abort(context, error)
        except DecodeError:
            await abort(context, malformed_message())
        except Exception as error:
            logger.exception("call failed method=%s", method.__name__)
            await abort(context, error)

    return cast(Rpc, wrapped)


def from_call(error: grpc.aio.AioRpcError) -> errors.PagewireError:
    """The error with which another of our processes has ended a call; that of its code if it came
    from the connection."""
    # Not every machine that reads plans has the package; a frontend does.
    from google.rpc import error_details_pb2, status_pb2

    trailers = error.trailing_metadata() or ()
    data = next((value for key, value in trailers if key == DETAILS_KEY), b"")
    status = status_pb2.Status.FromString(data)
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Unpack(info):
            break
    message = status.message or in_words(error.details())
    return from_failed(error.code().value[0], info.reason, message, dict(info.metadata))


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
