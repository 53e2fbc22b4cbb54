"""Reads the records of an earlier core from the workers of a group."""

import logging
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from pagewire.v1 import plan_pb2
from pagewire.v1 import worker_service_pb2 as pb
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub
from scheduler_service.columns import from_columns
from scheduler_service.core.config import KeptBlocks
from scheduler_service.core.kv_cache.block_pool import KEY_BYTES
from scheduler_service.core.kv_cache.records import rows_by_entry
from scheduler_service.errors import InvalidArgument
from scheduler_service.tasks import run_all

logger = logging.getLogger(__name__)

Entries: TypeAlias = dict[int, tuple[list[int], bytes]]
"""Rows and keys by first block."""


async def read_kept_blocks(
    stubs: Sequence[WorkerServiceStub], epoch: int, *, timeout_s: float
) -> KeptBlocks:
    """What all ranks of a group have recorded equally, and still hold."""
    return common_blocks(await run_all(*(_read(stub, epoch, timeout_s) for stub in stubs)))


def common_blocks(ranks: Sequence[tuple[int | None, Entries]]) -> KeptBlocks:
    """What the ranks have in common of their seeds and entries. They have executed the same plans,
    but not all have executed the last ones."""
    seeds = {seed for seed, _ in ranks}
    if len(seeds) > 1 or None in seeds:
        if len(seeds) > 1:
            logger.warning("cached blocks are not used reason=ranks have different key seeds")
        return KeptBlocks()
    first, *others = (entries for _, entries in ranks)
    common = {b: e for b, e in first.items() if all(other.get(b) == e for other in others)}
    stale = {block for _, entries in ranks for block in entries} - common.keys()
    return KeptBlocks(
        key_seed=seeds.pop(),
        blocks=[number for rows, _ in common.values() for number in rows],
        keys=b"".join(keys for _, keys in common.values()),
        stale=sorted(stale),
    )


async def _read(
    stub: WorkerServiceStub, epoch: int, timeout_s: float
) -> tuple[int | None, Entries]:
    """One rank's seed and entries; nothing if they are malformed."""
    seed: int | None = None
    entries: Entries = {}
    request = pb.GetCachedBlocksRequest(epoch=epoch)
    async for message in stub.GetCachedBlocks(request, timeout=timeout_s):
        seed = message.key_seed
        try:
            entries.update(entries_of(message.blocks))
        except InvalidArgument as error:
            logger.warning("cached blocks are not used reason=%s", error)
            return None, {}
    return seed, entries


def entries_of(message: plan_pb2.CachedBlocks) -> Iterator[tuple[int, tuple[list[int], bytes]]]:
    """Entries by first block. Raises InvalidArgument."""
    blocks: list[int] = from_columns(message)["blocks"]
    try:
        entries = rows_by_entry(blocks)
    except ValueError:
        raise InvalidArgument("blocks", "expected units of keys in the first row") from None
    start = 0
    for rows in entries:
        block, _, num_units, _, num_tail_tokens = rows[0]
        stop = start + KEY_BYTES * (num_units + (num_tail_tokens > 0))
        yield block, ([number for row in rows for number in row], message.keys[start:stop])
        start = stop
    if start != len(message.keys):
        raise InvalidArgument("keys", f"expected {start} bytes, got {len(message.keys)}")
