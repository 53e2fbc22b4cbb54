"""Two tries at one request: which of them gets it.

A client that has lost its connection tries again, perhaps through another frontend, while its
former attempt may be live: its frontend is cut off from the client but not from the core,
or has not noticed yet. The tries are numbered. Whatever order they come in, the greater number has
the request in the end, the other one ends with an error, and never do both run.
"""

from scheduler_service.errors import DuplicateRequest, RequestTakenOver


def check_later(request_id: str, attempt: int, *, live_attempt: int, is_same: bool) -> None:
    """Raise an error unless `attempt` is a later try at the live request that has its id.

    `is_same`: whether both requests are equal. RequestTakenOver is for an earlier try at it,
    DuplicateRequest for any other request.
    """
    if not is_same or attempt == live_attempt:
        raise DuplicateRequest(
            f"request {request_id} is live",
            details={"request_id": request_id, "attempt": live_attempt},
        )
    if attempt < live_attempt:
        raise taken_over(request_id, live_attempt)


def taken_over(request_id: str, attempt: int) -> RequestTakenOver:
    """The error of a try that a later one follows, the one of this number."""
    return RequestTakenOver(
        f"attempt {attempt} has taken the request over",
        details={"request_id": request_id, "attempt": attempt},
    )
