"""The deployment's state, for operators: as a message of GetStatus, and as lines in the log."""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pagewire.columns import pack
from pagewire.v1 import status_pb2 as pb
from scheduler_service.core.inspection import InspectionDetail, RequestSnapshot
from scheduler_service.core.kv_cache.block_pool import BlockMap
from scheduler_service.core.request_timing import to_us
from scheduler_service.core.scheduler_stats import FIRST_BOUND_US, GROWTH, WorkerGroupSnapshot
from scheduler_service.core_service.driver import CoreDriver
from scheduler_service.core_service.frontend_streams import FrontendStreams
from scheduler_service.core_service.worker_group import WorkerGroup
from scheduler_service.core_service.worker_registry import WorkerRegistry
from scheduler_service.errors import InvalidArgument
from service_common.version import VERSION

logger = logging.getLogger(__name__)


MAX_REQUESTS = 4096

# Fields that a snapshot of the core and its message both have.
_OF_PLANNED = (
    *("num_gpu_blocks", "num_free_gpu_blocks", "num_cpu_blocks", "num_free_cpu_blocks"),
    *("num_running_sequences", "block_size", "max_num_seqs"),
)
_OF_CORE = (
    *("num_waiting", "num_running", "num_swapped", "num_finished", "num_generated_tokens"),
    *("num_prefill_tokens", "num_preemptions", "num_swapped_out_blocks", "num_swapped_in_blocks"),
)
_OF_REQUEST = (
    *("request_id", "number", "tenant", "model", "priority", "num_prompt_tokens"),
    *("num_cached_tokens", "num_computed_tokens", "num_output_tokens", "max_tokens"),
    *("num_accepted_drafts", "num_drafts"),
    *("num_sequences", "error_reason", "placements"),
)


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


def request_status(request: RequestSnapshot, now_us: int) -> pb.RequestStatus:
    """One request; its times become ages."""
    start_us, end_us = request.submitted_us, request.ended_us
    return pb.RequestStatus(
        group_id=request.worker_group_id,
        state=pb.RequestState.ValueType(request.state),
        age_s=((end_us or now_us) - start_us) / 1e6,
        ended_age_s=(now_us - end_us) / 1e6 if end_us else 0.0,
        events=[pb.RequestEvent.ValueType(event) for event, _, _ in request.events],
        event_times_us=[max(0, at_us - start_us) for _, at_us, _ in request.events],
        event_values=[value for _, _, value in request.events],
        block_tables=map(pack, request.block_tables),
        host_block_tables=map(pack, request.host_block_tables),
        **{name: getattr(request, name) for name in _OF_REQUEST},
    )


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
            self._add_detail(status, detail, now)
        return status

    def _add_detail(self, status: pb.EngineStatus, detail: InspectionDetail, now: float) -> None:
        seen = self.driver.core.inspect(detail)
        now_us = to_us(now)
        status.requests.extend(request_status(request, now_us) for request in seen.requests)
        status.ended_requests.extend(
            request_status(request, now_us) for request in seen.ended_requests
        )
        status.num_unlisted_requests = seen.num_unlisted_requests
        for group in status.groups:
            maps = seen.block_maps.get(group.group_id)
            if maps is not None:
                group.gpu_blocks.CopyFrom(block_map(maps[0]))
                group.cpu_blocks.CopyFrom(block_map(maps[1]))

    def _counts(self, now: float) -> pb.EngineStatus:
        core = self.driver.core.snapshot()
        groups = {group.worker_group_id: group for group in core.worker_groups}
        return pb.EngineStatus(
            uptime_s=now - self._started_at,
            version=VERSION,
            models=[model.name for model in self.registry.served_models()],
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
                    group_id=loss.group_id, rank=loss.rank, model=loss.model, age_s=now - loss.at
                )
                for loss in self.registry.losses
            ],
            **{name: getattr(core, name) for name in _OF_CORE},
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
                    "num_swapped=%d num_swapped_out_blocks=%d num_swapped_in_blocks=%d",
                    now.num_running,
                    now.num_waiting,
                    now.num_finished - before.num_finished,
                    (now.num_generated_tokens - before.num_generated_tokens) / interval_s,
                    (now.num_prefill_tokens - before.num_prefill_tokens) / interval_s,
                    now.num_preemptions - before.num_preemptions,
                    now.num_swapped,
                    now.num_swapped_out_blocks - before.num_swapped_out_blocks,
                    now.num_swapped_in_blocks - before.num_swapped_in_blocks,
                )
            before = now

    def _group_status(
        self, group: WorkerGroup, planned: WorkerGroupSnapshot | None
    ) -> pb.WorkerGroupStatus:
        status = pb.WorkerGroupStatus(
            group_id=group.group_id,
            state=group.state,
            model=group.registration.model.name,
            address=group.registration.address,
            num_steps=group.num_steps,
            epoch=group.epoch,
            heartbeat_age_s=self.driver.clock() - group.last_heartbeat,
            world_size=group.world_size,
            arithmetic=group.registration.model.arithmetic,
            uses_cuda_graphs=group.registration.model.uses_cuda_graphs,
            weights=group.registration.model.weights,
            cache_layout=group.registration.model.cache_layout,
        )
        if planned is not None:
            for name in _OF_PLANNED:
                setattr(status, name, getattr(planned, name))
            status.decode_step_us = planned.us_per_decode_step
            status.prefill_token_us = planned.us_per_prefill_token
        return status
