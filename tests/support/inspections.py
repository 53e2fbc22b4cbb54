"""What a core shows of itself, held against what it has."""

from collections import Counter

from scheduler_service.core import Inspection, InspectionDetail, SchedulerCore
from scheduler_service.core.kv_cache.block_pool import BlockMap

ALL = InspectionDetail(include_requests=True, include_blocks=True, max_requests=1_000)


def check_inspection(core: SchedulerCore) -> Inspection:
    """Assert that counts, requests, block tables and block maps agree."""
    counts, seen = core.snapshot(), core.inspect(ALL)
    states = Counter(request.state.name for request in seen.requests)
    assert states["PREFILLING"] + states["DECODING"] == counts.num_running
    assert states["SWAPPED"] == counts.num_swapped
    assert len(seen.requests) - counts.num_running - counts.num_swapped == counts.num_waiting
    for group in counts.worker_groups:
        device, host = seen.block_maps[group.worker_group_id]
        requests = [
            request for request in seen.requests if request.worker_group_id == group.worker_group_id
        ]
        cache = core._fleet.schedulers[group.worker_group_id].cache
        exchange = cache.exchange
        tables = {request.number: request.block_tables for request in requests}
        moving = exchange.references(on_host=False)
        _check_map(device, group.num_free_gpu_blocks, tables, moving)
        tables = {request.number: request.host_block_tables for request in requests}
        # Those that the next plan fills with what was evicted for copies of another group's.
        moving = exchange.references(on_host=True) + Counter(cache.host._pinned)
        _check_map(host, group.num_free_cpu_blocks, tables, moving)
    for request in seen.requests + seen.ended_requests:
        times = [at_us for _, at_us, _ in request.events]
        assert times == sorted(times)
    return seen


def _check_map(
    blocks: BlockMap, num_free: int, tables: dict[int, list[list[int]]], moving: Counter[int]
) -> None:
    """moving: references without a sequence, by block."""
    counts = Counter(b for own in tables.values() for table in own for b in table)
    num_references = counts + moving
    assert list(blocks.num_references) == [num_references[b] for b in range(len(blocks.owners))]
    num_unowned = sum(owner <= 0 for owner in blocks.owners)
    assert num_unowned == num_free + len(moving.keys() - counts.keys())
    for block, owner in enumerate(blocks.owners):
        owners = {number for number, own in tables.items() if any(block in t for t in own)}
        assert owner in owners if owners else owner <= 0
