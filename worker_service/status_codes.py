"""Our exceptions as gRPC statuses, with `google.rpc` details."""

import re
from typing import NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from worker_service import errors

ERROR_DOMAIN = "worker.pagewire"
DETAILS_KEY = "grpc-status-details-bin"

STATUS_CODES: dict[type[errors.WorkerError], grpc.StatusCode] = {
    errors.WorkerError: grpc.StatusCode.INTERNAL,
    errors.InvalidOption: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ModelNotFound: grpc.StatusCode.NOT_FOUND,
    errors.UnsupportedModel: grpc.StatusCode.FAILED_PRECONDITION,
    errors.BadCheckpoint: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CannotListen: grpc.StatusCode.FAILED_PRECONDITION,
    errors.OutOfMemory: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.NotReady: grpc.StatusCode.UNAVAILABLE,
    errors.InvalidPlan: grpc.StatusCode.INVALID_ARGUMENT,
    errors.OutOfOrder: grpc.StatusCode.FAILED_PRECONDITION,
    errors.SentAway: grpc.StatusCode.UNAVAILABLE,
    errors.NotAMember: grpc.StatusCode.UNAUTHENTICATED,
    errors.StaleEpoch: grpc.StatusCode.ABORTED,
    errors.GroupBroken: grpc.StatusCode.ABORTED,
    errors.StepFailed: grpc.StatusCode.INTERNAL,
}


def to_status(error: errors.WorkerError) -> status_pb2.Status:
    """The rich status of an error: an ErrorInfo, and a BadRequest where a field is to blame."""
    details: list[any_pb2.Any] = [
        _pack(error_details_pb2.ErrorInfo(reason=_reason(type(error)), domain=ERROR_DOMAIN))
    ]
    if isinstance(error, errors.InvalidPlan):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.problem
        )
        details.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
    code = STATUS_CODES[type(error)]
    return status_pb2.Status(code=code.value[0], message=str(error), details=details)


async def abort(context: grpc.aio.ServicerContext, error: errors.WorkerError) -> NoReturn:
    """End a call with an error's status."""
    status = to_status(error)
    metadata = ((DETAILS_KEY, status.SerializeToString()),)
    await context.abort(STATUS_CODES[type(error)], status.message, metadata)
    raise AssertionError("abort returned")


def _reason(kind: type[errors.WorkerError]) -> str:
    """`StaleEpoch` becomes `STALE_EPOCH`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).upper()


def _pack(message: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
