"""Two attempts at one request, of which the later one takes it over.

A client that has lost its connection retries, perhaps through another frontend, while its former
attempt may be live: its frontend is cut off from the client but not from the core, or has not
noticed yet. Attempts are numbered. In whatever order they arrive, the one with the greater number
gets the request, the other one ends with an error, and the two never run at the same time.
"""

from scheduler_service.errors import DuplicateRequest, RequestTakenOver


def check_later(request_id: str, attempt: int, *, live_attempt: int, is_same: bool) -> None:
    """Raise an error unless `attempt` is a later attempt at the live request with its id.

    `is_same`: whether both requests are equal. Raises RequestTakenOver for an earlier
    attempt, DuplicateRequest for any other request.
    """
    if not is_same or attempt == live_attempt:
        raise DuplicateRequest(
            f"request {request_id} is live",
            details={"request_id": request_id, "attempt": live_attempt},
        )
    if attempt < live_attempt:
        raise taken_over(request_id, live_attempt)


def taken_over(request_id: str, attempt: int) -> RequestTakenOver:
    """The error of an attempt that was superseded by this later one."""
    return RequestTakenOver(
        f"attempt {attempt} has taken the request over",
        details={"request_id": request_id, "attempt": attempt},
    )
