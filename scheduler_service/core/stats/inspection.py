"""A close look at the core's state: requests one by one, memory block by block.

It changes nothing, and costs nothing as long as nobody asks.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from scheduler_service.core import request_snapshot
from scheduler_service.core.block_map import BlockMap
from scheduler_service.core.request_snapshot import RequestSnapshot
from scheduler_service.core.scheduling.scheduler import Scheduler
from scheduler_service.core.sequence import SequenceGroup

MAX_ENDED = 64
"""Requests that have ended which are remembered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectionDetail:
    """What is looked at."""

    include_requests: bool = False
    include_blocks: bool = False
    max_requests: int = 256
    """The most live requests."""


@dataclass(slots=True, kw_only=True)
class Inspection:
    """What was asked for; the rest is empty."""

    requests: list[RequestSnapshot] = field(default_factory=list)
    """Live ones: those that run, then those swapped out, then those that wait."""
    num_unlisted_requests: int = 0
    ended_requests: list[RequestSnapshot] = field(default_factory=list)
    """The last one last."""
    block_maps: dict[str, tuple[BlockMap, BlockMap]] = field(default_factory=dict)
    """By worker group: device and host."""


class Inspector:
    """Looks at a core's parts; remembers the last requests that ended."""

    def __init__(self, schedulers: Mapping[str, Scheduler]) -> None:
        self._schedulers = schedulers
        self._ended: deque[RequestSnapshot] = deque(maxlen=MAX_ENDED)

    def note_end(self, group: SequenceGroup, now_us: int) -> None:
        """Remember a request whose sequences have all ended."""
        self._ended.append(request_snapshot.of_ended(group, now_us))

    def look(self, groups: Iterable[SequenceGroup], detail: InspectionDetail) -> Inspection:
        """What there is to see; `groups` are all that are live, the longest accepted first."""
        inspection = Inspection()
        if detail.include_blocks:
            inspection.block_maps = {
                group_id: scheduler.block_maps() for group_id, scheduler in self._schedulers.items()
            }
        if detail.include_requests:
            self._add_requests(inspection, groups, detail)
        return inspection

    def _add_requests(
        self, inspection: Inspection, groups: Iterable[SequenceGroup], detail: InspectionDetail
    ) -> None:
        ordered = _in_order(groups)
        places = {group: s for s in self._schedulers.values() for group in s.groups}
        prefilling = {group for s in self._schedulers.values() for group in s.prefilling_groups()}
        for group in ordered[: detail.max_requests]:
            scheduler = places.get(group)
            group_id = scheduler.capacity.group_id if scheduler is not None else ""
            snapshot = request_snapshot.of_live(group, group_id, prefills=group in prefilling)
            if scheduler is not None and detail.include_blocks:
                request_snapshot.add_tables(snapshot, group, scheduler.blocks)
            inspection.requests.append(snapshot)
        inspection.num_unlisted_requests = len(ordered) - len(inspection.requests)
        inspection.ended_requests = list(self._ended)


def _in_order(groups: Iterable[SequenceGroup]) -> list[SequenceGroup]:
    running: list[SequenceGroup] = []
    swapped: list[SequenceGroup] = []
    waiting: list[SequenceGroup] = []
    for group in groups:
        if group.num_running:
            running.append(group)
        else:
            (swapped if group.swapped() else waiting).append(group)
    return [*running, *swapped, *waiting]
