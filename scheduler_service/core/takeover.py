"""A live request that its client goes on with elsewhere; `scheduler_service/attempts.py` says why.

The later try is a request like any other, with what its client has received: it starts again from
there, and finds in the prefix cache what the former one has computed.
"""

from dataclasses import replace

from scheduler_service import attempts
from scheduler_service.core.request import Request
from scheduler_service.core.sequence import SequenceGroup


def check_takes_over(request: Request, live: Request) -> None:
    """Raise RequestTakenOver or DuplicateRequest unless a request is a later try at the live one
    of its tenant that has its id."""
    attempts.check_later(
        request.request_id,
        request.attempt,
        live_attempt=live.attempt,
        is_same=bool(request.fingerprint)
        and (request.fingerprint, request.model) == (live.fingerprint, live.model),
    )


def continuation(request: Request, former: SequenceGroup, now_us: int) -> Request:
    """A later try at a live group's request: it keeps its place among others, and its history."""
    arrived_us = former.clock.submitted_us - former.request.waited_us
    return replace(
        request,
        was_accepted=True,
        waited_us=max(request.waited_us, now_us - arrived_us),
        num_worker_losses=max(request.num_worker_losses, former.num_worker_losses),
    )
