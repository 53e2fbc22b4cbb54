"""The worker's errors.

    WorkerError
    ├── InvalidOption      a setting is wrong, or this machine or model cannot honour it
    ├── ModelNotFound      neither a directory nor a model that can be downloaded
    ├── UnsupportedModel   the checkpoint is sound, but Pagewire cannot serve it
    ├── BadCheckpoint      files are missing, damaged or do not fit the model
    ├── OutOfMemory        not even one KV block fits
    ├── ProfilingFailed    the largest batch cannot be computed
    ├── CaptureFailed      decode steps cannot be captured as CUDA graphs
    ├── NotReady           the model is still loading, or the worker is shutting down
    ├── InvalidPlan        a message from the core contradicts itself or our state
    ├── OutOfOrder         a call or a step that is out of order
    ├── AdapterNotFound    no adapter at a path or with a digest
    ├── BadAdapter         an adapter's files are damaged, unsupported or do not fit the model
    ├── AdaptersFull       no room for another adapter
    ├── LeaseDenied        a reader has no lease in force for blocks
    ├── StaleTable         a newer table of adapters was set
    ├── WorkerRejected     the core instructed this worker to stop
    ├── StaleEpoch         a newer epoch has taken over
    ├── GroupBroken        another rank of the group is gone
    ├── DeviceLost         this process can no longer use its device
    └── StepFailed         a bug of ours, or a device error, during a step

Nothing here depends on gRPC: `worker_service/service/servicer.py` maps each class to a status code.
"""

from service_common.errors import InvalidArgument, PagewireError


class WorkerError(PagewireError):
    """The root; the message is one line for users."""


class InvalidOption(WorkerError):
    """A setting is invalid; the message names it, its value and what is allowed."""


class ModelNotFound(WorkerError):
    """There is no model in the directory or on the hub."""


class UnsupportedModel(WorkerError):
    """The model needs a feature that Pagewire lacks; the message names it."""


class BadCheckpoint(WorkerError):
    """Files of a checkpoint are missing, damaged or contradict its configuration."""


class OutOfMemory(WorkerError):
    """Memory does not suffice for a KV cache of one block."""


class ProfilingFailed(WorkerError):
    """The largest batch cannot be computed, for another reason than memory."""


class CaptureFailed(WorkerError):
    """Decode steps cannot be captured as CUDA graphs; the message names the flags that help."""


class NotReady(WorkerError):
    """The model is still loading, or the worker is shutting down; use another worker."""


class InvalidPlan(WorkerError, InvalidArgument):
    """A message from the core is malformed or contradicts what this worker holds."""


class OutOfOrder(WorkerError):
    """A call or a step is out of order."""


class AdapterNotFound(WorkerError):
    """There is no adapter at this path, or none with this digest is loaded."""


class BadAdapter(WorkerError):
    """An adapter is unusable; the message names the field, its value and what is allowed."""


class AdaptersFull(WorkerError):
    """As many adapters are held as are allowed."""


class LeaseDenied(WorkerError):
    """A reader of blocks has no lease in force that names them."""


class StaleTable(WorkerError):
    """A table of adapters that is older than the worker's."""


class WorkerRejected(WorkerError):
    """The core instructed this worker to stop; the message has the reason."""


class StaleEpoch(WorkerError):
    """A newer epoch has taken over; the older epoch's state on this worker is gone."""


class GroupBroken(WorkerError):
    """Another rank of the group is gone or has disconnected; a new epoch connects them again."""


class DeviceLost(WorkerError):
    """This process can no longer use its device; a new process may."""


class StepFailed(WorkerError):
    """A step failed for a reason that is not in its plan; the log has the traceback."""
