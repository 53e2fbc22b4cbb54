"""The errors of the scheduler service, independent of gRPC and HTTP.

    PagewireError
    ├── InvalidArgument        a field is wrong, whatever our state
    ├── PromptTooLong          prompt and output can never fit model or memory
    ├── UnsupportedByModel     this deployment's model cannot: no tokenizer, no chat template
    ├── QueueFull              try again later
    ├── TenantLimit            the same, for the open requests of the caller's tenant
    ├── DeadlineUnreachable    the same: what waits before the request takes too long for it
    ├── UnknownModel           no such model is served
    ├── UnknownAdapter         no such adapter is loaded
    ├── DuplicateAdapter       the name means an adapter of another content
    ├── AdapterRefused         a worker cannot use the adapter, or has no room for it
    ├── UnknownRequest         no such request is live
    ├── UnknownWorkerGroup     no worker of such a group is registered
    ├── DuplicateRequest       a request with this id is live
    ├── RequestTakenOver       its client continues it elsewhere
    ├── RequestAborted         the client, or another call, ended the request
    ├── DeadlineExceeded       the request's time is up
    ├── Unavailable            no worker, or shutting down; safe to retry
    ├── NoCandidates           its own parameters exclude every token that could come next
    ├── GenerationFailed       the model's numbers or a worker failed this one request
    ├── Unauthenticated        no or wrong credentials
    └── PermissionDenied       these credentials do not allow that

The root and three of its classes are `service_common`'s. Nothing here knows gRPC:
`scheduler_service/status_codes.py` maps each class to a status code.
"""

from pathlib import Path

from service_common.errors import DeadlineExceeded as DeadlineExceeded
from service_common.errors import InvalidArgument as InvalidArgument
from service_common.errors import PagewireError as PagewireError
from service_common.errors import Unauthenticated as Unauthenticated


class PromptTooLong(PagewireError):
    """Prompt and output can never fit the model's length or the cache."""


class UnsupportedByModel(PagewireError):
    """The served model lacks what the request needs, such as a tokenizer."""


class QueueFull(PagewireError):
    """The waiting queue is full."""


class TenantLimit(PagewireError):
    """The tenant has as many requests or waiting tokens as it may."""


class DeadlineUnreachable(PagewireError):
    """Because of what waits before it, the request cannot meet its deadline."""


class UnknownModel(PagewireError):
    """No model of this name is served."""


class UnknownAdapter(PagewireError):
    """No adapter of this name or content is loaded."""


class DuplicateAdapter(PagewireError):
    """The name means an adapter of another content."""


class AdapterRefused(PagewireError):
    """A worker cannot use the adapter, or has no room for it; nothing has changed."""


class UnknownRequest(PagewireError):
    """No live request has this id."""


class UnknownWorkerGroup(PagewireError):
    """No worker of this group is registered."""


class DuplicateRequest(PagewireError):
    """A live request has this id."""


class RequestTakenOver(PagewireError, reason="TAKEN_OVER"):
    """A later try at the request has taken it over; this one has no reader any more."""


class RequestAborted(PagewireError, reason="ABORTED_BY_CLIENT"):
    """The request was ended by its client or by another call."""


class Unavailable(PagewireError):
    """Nothing can be done now: no worker, or the service is shutting down."""


class NoCandidates(PagewireError):
    """The request's own parameters exclude every token that could come next."""


class GenerationFailed(PagewireError):
    """The model or its worker failed this request; others are unaffected."""


class PermissionDenied(PagewireError):
    """The caller is known, but may not do this."""


class CannotRecord(Exception):
    """The file of a recording cannot be created."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"record: {path}: {reason}")
