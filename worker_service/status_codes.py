"""Our exceptions as gRPC statuses, with `google.rpc` details."""

import grpc

from service_common.errors import PagewireError
from service_common.grpc_status import Statuses
from worker_service import errors

STATUS_CODES: dict[type[PagewireError], grpc.StatusCode] = {
    errors.WorkerError: grpc.StatusCode.INTERNAL,
    errors.InvalidOption: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ModelNotFound: grpc.StatusCode.NOT_FOUND,
    errors.UnsupportedModel: grpc.StatusCode.FAILED_PRECONDITION,
    errors.BadCheckpoint: grpc.StatusCode.FAILED_PRECONDITION,
    errors.OutOfMemory: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.NotReady: grpc.StatusCode.UNAVAILABLE,
    errors.InvalidPlan: grpc.StatusCode.INVALID_ARGUMENT,
    errors.OutOfOrder: grpc.StatusCode.FAILED_PRECONDITION,
    errors.SentAway: grpc.StatusCode.UNAVAILABLE,
    errors.StaleEpoch: grpc.StatusCode.ABORTED,
    errors.GroupBroken: grpc.StatusCode.ABORTED,
    errors.DeviceLost: grpc.StatusCode.UNAVAILABLE,
    errors.StepFailed: grpc.StatusCode.INTERNAL,
}

_STATUSES = Statuses(STATUS_CODES)

to_status = _STATUSES.status
abort = _STATUSES.abort
