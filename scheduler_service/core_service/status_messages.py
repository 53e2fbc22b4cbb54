"""What the core tells about requests and blocks, as messages."""

from collections.abc import Iterable

from pagewire.v1 import status_pb2 as pb
from scheduler_service.columns import to_column
from scheduler_service.core.kv_cache.block_pool import BlockMap
from scheduler_service.core.stats.inspection import InspectionDetail, RequestSnapshot
from scheduler_service.core.stats.scheduler_stats import FIRST_BOUND_US, GROWTH
from scheduler_service.errors import InvalidArgument

MAX_REQUESTS = 4096
_MAX_BYTE = 255


def to_detail(message: pb.StatusDetail) -> InspectionDetail:
    """What is asked for; raises InvalidArgument."""
    detail = InspectionDetail(
        include_requests=message.include_requests, include_blocks=message.include_blocks
    )
    if not message.HasField("max_requests"):
        return detail
    if not 1 <= message.max_requests <= MAX_REQUESTS:
        raise InvalidArgument("detail.max_requests", f"expected 1 to {MAX_REQUESTS}")
    return InspectionDetail(
        include_requests=message.include_requests,
        include_blocks=message.include_blocks,
        max_requests=message.max_requests,
    )


def request_status(request: RequestSnapshot, now_us: int) -> pb.RequestStatus:
    """One request; its times become ages."""
    start_us, end_us = request.submitted_us, request.ended_us
    return pb.RequestStatus(
        request_id=request.request_id,
        number=request.number,
        tenant=request.tenant,
        model=request.model,
        group_id=request.group_id,
        state=pb.RequestState.ValueType(request.state),
        priority=request.priority,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_output_tokens=request.num_output_tokens,
        max_tokens=request.max_tokens,
        num_sequences=request.num_sequences,
        age_s=((end_us or now_us) - start_us) / 1e6,
        ended_age_s=(now_us - end_us) / 1e6 if end_us else 0.0,
        error_reason=request.error_reason,
        placements=request.placements,
        events=[pb.RequestEvent.ValueType(event) for event, _, _ in request.events],
        event_times_us=[max(0, at_us - start_us) for _, at_us, _ in request.events],
        event_values=[value for _, _, value in request.events],
        block_tables=map(to_column, request.block_tables),
        host_block_tables=map(to_column, request.host_block_tables),
    )


def block_map(blocks: BlockMap) -> pb.BlockMap:
    """A memory's columns."""
    return pb.BlockMap(
        owners=to_column(blocks.owners), num_references=_to_bytes(blocks.num_references)
    )


def histogram(counts: Iterable[int]) -> pb.LatencyHistogram:
    """A histogram without the empty buckets at its end."""
    counts = list(counts)
    while counts and not counts[-1]:
        counts.pop()
    return pb.LatencyHistogram(first_bound_s=FIRST_BOUND_US / 1e6, growth=GROWTH, counts=counts)


def _to_bytes(counts: list[int]) -> bytes:
    if max(counts, default=0) <= _MAX_BYTE:
        return bytes(counts)
    return bytes([min(count, _MAX_BYTE) for count in counts])
