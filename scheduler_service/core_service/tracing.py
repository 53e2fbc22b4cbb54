"""A request's timeline at the core, as spans under its frontend's."""

from collections.abc import Iterator

from scheduler_service.core.request_timing import RequestEvent, Timeline, TimelineEntry
from scheduler_service.core.sequence import SequenceGroup
from service_common.tracing import Attributes, Event, Tracing

BEGINS = {
    RequestEvent.QUEUED: "queue",
    RequestEvent.RESUMED: "recovery",
    RequestEvent.STARTED: "prefill",
    RequestEvent.FIRST_TOKEN: "decode",
    RequestEvent.SWAPPED_IN: "decode",
    RequestEvent.PREEMPTED: "preempted",
    RequestEvent.SWAPPED_OUT: "preempted",
    RequestEvent.WORKER_LOST: "recovery",
    RequestEvent.MOVED: "recovery",
}
"""The phase that an event starts."""

EVENTS = {
    RequestEvent.RESUMED: "resumed",
    RequestEvent.PLACED: "placed",
    RequestEvent.PREFILLED: "prefilled",
    RequestEvent.FIRST_TOKEN: "first token",
    RequestEvent.PREEMPTED: "preempted",
    RequestEvent.SWAPPED_OUT: "swapped out",
    RequestEvent.SWAPPED_IN: "swapped in",
    RequestEvent.WORKER_LOST: "worker lost",
    RequestEvent.MOVED: "moved",
}
"""Names of the events of the request's span; other events are its start and its end."""

_OUT_OF_BATCH = ("preempted", "recovery")

Phase = tuple[str, int, int]
"""Name, start and end in microseconds."""


def phases(entries: list[TimelineEntry]) -> Iterator[Phase]:
    """The request's phases, without gaps, from its first event to its last."""
    name, since = "", 0
    previous: RequestEvent | None = None
    num_to_compute = 0
    kinds = {event for event, *_ in entries}
    # A request that continues at a new core with tokens has no first token here.
    has_token = RequestEvent.RESUMED in kinds and RequestEvent.FIRST_TOKEN not in kinds
    for event, now_us, num_tokens in entries:
        then = BEGINS.get(event, name)
        if event is RequestEvent.STARTED:
            num_to_compute = num_tokens
            then = "decode" if previous is RequestEvent.SWAPPED_IN else then
        elif event is RequestEvent.FIRST_TOKEN:
            has_token = True
            then = name if name in _OUT_OF_BATCH else then  # it was in flight
        elif event is RequestEvent.WORKER_LOST and name == "queue":
            then = name  # it had not begun there
        elif event is RequestEvent.PREFILLED and name == "prefill":
            is_done = has_token or num_tokens >= num_to_compute
            then = "decode" if is_done else then
        previous = event
        if then != name or event is RequestEvent.ENDED:
            if name:
                yield name, since, now_us
            name, since = then, now_us


def events(timeline: Timeline) -> Iterator[Event]:
    """The request's events, each with its worker group or with the number of tokens so far."""
    for event, now_us, value in timeline.entries:
        name = EVENTS.get(event)
        if event is RequestEvent.PLACED:
            # After very many placements the first ones share an entry of the timeline.
            group_id = timeline.placements[min(value, len(timeline.placements) - 1)]
            yield "placed", now_us / 1e6, {"pagewire.group": group_id}
        elif name is not None:
            yield name, now_us / 1e6, {"pagewire.num_tokens": value}


def export(tracing: Tracing, seq_group: SequenceGroup) -> None:
    """Spans of a request that has ended."""
    request, timings = seq_group.request, seq_group.clock.timings
    timeline = seq_group.clock.timeline
    entries = timeline.entries
    attributes: Attributes = {
        "pagewire.request_id": request.request_id,
        "pagewire.groups": ",".join(timeline.placements),
        "pagewire.num_preemptions": sum(
            event in (RequestEvent.PREEMPTED, RequestEvent.SWAPPED_OUT) for event, *_ in entries
        ),
        "pagewire.num_worker_losses": sum(
            event is RequestEvent.WORKER_LOST for event, *_ in entries
        ),
        "pagewire.num_drafts": timings.num_drafts,
        "pagewire.num_accepted_drafts": timings.num_accepted_drafts,
    }
    span = tracing.add(
        "pagewire.schedule",
        request.traceparent,
        entries[0][1] / 1e6,
        entries[-1][1] / 1e6,
        attributes,
        events(timeline),
    )
    for name, start_us, end_us in phases(entries):
        tracing.add(name, span, start_us / 1e6, end_us / 1e6)
