"""The deployment's state, for operators: as a message of GetStatus, and as lines in the log."""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import Message

from pagewire.columns import pack
from pagewire.v1 import status_pb2 as pb
from scheduler_service.core.inspection import InspectionDetail, RequestSnapshot
from scheduler_service.core.kv_cache.block_pool import BlockMap
from scheduler_service.core.request_timing import to_us
from scheduler_service.core.scheduler_stats import FIRST_BOUND_US, GROWTH, WorkerGroupSnapshot
from scheduler_service.core_service.driver import CoreDriver
from scheduler_service.core_service.frontend_streams import FrontendStreams
from scheduler_service.core_service.workers.worker_group import WorkerGroup
from scheduler_service.core_service.workers.worker_registry import WorkerRegistry
from scheduler_service.core_service.workers.worker_session import role_of
from scheduler_service.errors import InvalidArgument
from service_common.version import VERSION

logger = logging.getLogger(__name__)


MAX_REQUESTS = 4096


def to_detail(message: pb.StatusDetail) -> InspectionDetail:
    """The requested detail; raises InvalidArgument."""
    detail = InspectionDetail(
        include_requests=message.include_requests, include_blocks=message.include_blocks
    )
    if not message.HasField("max_requests"):
        return detail
    if not 1 <= message.max_requests <= MAX_REQUESTS:
        raise InvalidArgument("detail.max_requests", f"expected 1 to {MAX_REQUESTS}")
    return replace(detail, max_requests=message.max_requests)


def request_status(request: RequestSnapshot, started_us: int) -> pb.RequestStatus:
    """One request; its times become times of the core's uptime."""
    submitted_us, ended_us = request.submitted_us, request.ended_us
    return pb.RequestStatus(
        group_id=request.worker_group_id,
        state=pb.RequestState.ValueType(request.state),
        accepted_at_s=(submitted_us - started_us) / 1e6,
        ended_at_s=(ended_us - started_us) / 1e6 if ended_us else None,
        events=[pb.RequestEvent.ValueType(event) for event, _, _ in request.events],
        event_times_us=[max(0, at_us - submitted_us) for _, at_us, _ in request.events],
        event_values=[value for _, _, value in request.events],
        block_tables=map(pack, request.block_tables),
        host_block_tables=map(pack, request.host_block_tables),
        **_same_fields(pb.RequestStatus, request),
    )


def _same_fields(kind: type[Message], snapshot: object) -> dict[str, Any]:
    """The values of a snapshot that the message has under the same names, as they are."""
    return {
        field.name: getattr(snapshot, field.name)
        for field in kind.DESCRIPTOR.fields
        if hasattr(snapshot, field.name)
        and field.message_type is field.enum_type is None
        and field.type != field.TYPE_BYTES
    }


def block_map(blocks: BlockMap) -> pb.BlockMap:
    """The message for one memory's block map."""
    return pb.BlockMap(owners=blocks.owners.tobytes(), num_references=blocks.num_references)


def histogram(counts: Iterable[int]) -> pb.LatencyHistogram:
    """A histogram without the empty buckets at its end."""
    counts = list(counts)
    while counts and not counts[-1]:
        counts.pop()
    return pb.LatencyHistogram(first_bound_s=FIRST_BOUND_US / 1e6, growth=GROWTH, counts=counts)


SUMMARY_INTERVAL_S = 10.0


@dataclass(eq=False)
class StatusBoard:
    """Creates `EngineStatus` messages; uptime counts from its construction."""

    driver: CoreDriver
    registry: WorkerRegistry
    frontends: FrontendStreams

    def __post_init__(self) -> None:
        self._started_at = self.driver.clock()

    def snapshot(self, detail: InspectionDetail | None = None) -> pb.EngineStatus:
        """The current state, in the requested detail."""
        now = self.driver.clock()
        status = self._counts(now)
        if detail is not None and (detail.include_requests or detail.include_blocks):
            self._add_detail(status, detail)
        return status

    def _add_detail(self, status: pb.EngineStatus, detail: InspectionDetail) -> None:
        seen = self.driver.core.inspect(detail)
        started_us = to_us(self._started_at)
        for snapshots, messages in (
            (seen.requests, status.requests),
            (seen.ended_requests, status.ended_requests),
        ):
            messages.extend(request_status(request, started_us) for request in snapshots)
        status.num_unlisted_requests = seen.num_unlisted_requests
        for group in status.groups:
            maps = seen.block_maps.get(group.group_id)
            if maps is not None:
                group.gpu_blocks.CopyFrom(block_map(maps[0]))
                group.cpu_blocks.CopyFrom(block_map(maps[1]))

    def _counts(self, now: float) -> pb.EngineStatus:
        core = self.driver.core.snapshot()
        groups = {group.worker_group_id: group for group in core.worker_groups}
        served = [model.name for model in self.registry.served_models()]
        return pb.EngineStatus(
            uptime_s=now - self._started_at,
            version=VERSION,
            num_frontends=len(self.frontends),
            groups=[
                self._group_status(group, groups.get(group.group_id)) for group in self.registry
            ],
            loading=self.registry.loading(),
            time_to_first_token=histogram(core.first_token_counts),
            inter_token_latency=histogram(core.inter_token_counts),
            num_worker_losses=self.registry.num_losses,
            worker_losses=[
                pb.WorkerLoss(
                    lost_at_s=loss.at - self._started_at, **_same_fields(pb.WorkerLoss, loss)
                )
                for loss in self.registry.losses
            ],
            **_same_fields(pb.EngineStatus, core) | {"models": served},
        )

    async def log_summaries(self, interval_s: float = SUMMARY_INTERVAL_S) -> None:
        """Log a summary every `interval_s` seconds if anything has changed."""
        before = self.driver.core.snapshot()
        while True:
            await asyncio.sleep(interval_s)
            now = self.driver.core.snapshot()
            if now != before:
                logger.info(
                    "summary num_running=%d num_waiting=%d num_finished=%d "
                    "generated_tokens_per_s=%.1f prefill_tokens_per_s=%.1f num_preemptions=%d "
                    "num_swapped=%d num_swapped_out_blocks=%d num_swapped_in_blocks=%d "
                    "num_fetched_blocks=%d",
                    now.num_running,
                    now.num_waiting,
                    now.num_finished - before.num_finished,
                    (now.num_generated_tokens - before.num_generated_tokens) / interval_s,
                    (now.num_prefill_tokens - before.num_prefill_tokens) / interval_s,
                    now.num_preemptions - before.num_preemptions,
                    now.num_swapped,
                    now.num_swapped_out_blocks - before.num_swapped_out_blocks,
                    now.num_swapped_in_blocks - before.num_swapped_in_blocks,
                    now.num_fetched_blocks - before.num_fetched_blocks,
                )
            before = now

    def _group_status(
        self, group: WorkerGroup, planned: WorkerGroupSnapshot | None
    ) -> pb.WorkerGroupStatus:
        model = group.registration.model
        facts = _same_fields(pb.WorkerGroupStatus, model)
        if planned is not None:
            facts |= _same_fields(pb.WorkerGroupStatus, planned)
            facts["decode_step_us"] = planned.us_per_decode_step
            facts["prefill_token_us"] = planned.us_per_prefill_token
        facts |= _same_fields(pb.WorkerGroupStatus, group) | {"model": model.name}
        return pb.WorkerGroupStatus(
            state=group.state,
            address=group.registration.address,
            role=role_of(group.registration).value,
            last_heartbeat_at_s=group.last_heartbeat - self._started_at,
            cache_groups=[
                pb.CacheGroupStatus(**_same_fields(pb.CacheGroupStatus, usage))
                for usage in (planned.cache_groups if planned is not None else ())
            ],
            **facts,
        )
