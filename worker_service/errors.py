"""What can go wrong in a worker, in our own words.

    WorkerError
    ├── InvalidOption      a setting is wrong, or this machine or model cannot honour it
    ├── ModelNotFound      neither a directory nor a model that can be downloaded
    ├── UnsupportedModel   the checkpoint is sound, but Pagewire cannot serve it
    ├── BadCheckpoint      files are missing, damaged or do not fit the model
    ├── OutOfMemory        not even one KV block fits
    ├── NotReady           the model is still loading, or the worker is shutting down
    ├── InvalidPlan        a message from the core contradicts itself or our state
    ├── OutOfOrder         a call or a step out of its turn
    ├── SentAway           the core ended this worker
    ├── StaleEpoch         a newer epoch has taken over
    ├── GroupBroken        another rank of the group is gone
    ├── DeviceLost         the device computes nothing more for this process
    └── StepFailed         our own bug, or the device's failure, in the middle of a step

Nothing here knows gRPC: `worker_service/service/servicer.py` maps each class to a status code.
"""

import re

from service_common.errors import InvalidArgument, PagewireError


class WorkerError(PagewireError):
    """The root; the message is one line, for people."""

    reason = "WORKER_ERROR"

    def __init_subclass__(cls) -> None:
        """The reason that programs see: `StaleEpoch` becomes `STALE_EPOCH`."""
        cls.reason = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).upper()


class InvalidOption(WorkerError):
    """A setting is wrong; the message names it and what was expected."""


class ModelNotFound(WorkerError):
    """No model at the place named."""


class UnsupportedModel(WorkerError):
    """The model needs something Pagewire does not do; the message names it."""


class BadCheckpoint(WorkerError):
    """Files of a checkpoint are missing, damaged or contradict its configuration."""


class OutOfMemory(WorkerError):
    """There is no room for a KV cache of even one block."""


class NotReady(WorkerError):
    """The model is still loading, or the worker is shutting down; another may serve."""


class InvalidPlan(WorkerError, InvalidArgument):
    """A message from the core is malformed or contradicts what this worker holds."""


class OutOfOrder(WorkerError):
    """A call or a step came out of its turn."""


class SentAway(WorkerError):
    """The core ended this worker; the message says why."""


class StaleEpoch(WorkerError):
    """A newer epoch has taken over; what the older one had on this worker is gone."""


class GroupBroken(WorkerError):
    """Another rank of the group is gone, or parted with this one; a new epoch joins them again."""


class DeviceLost(WorkerError):
    """The device computes nothing more for this process; a new one may find it sound."""


class StepFailed(WorkerError):
    """A step broke off for a reason that is not in its plan; the log has the traceback."""
