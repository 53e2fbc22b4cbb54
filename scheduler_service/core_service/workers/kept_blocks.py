"""Reads what an earlier core has left in the caches of a group's workers."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pagewire.v1 import plan_pb2
from pagewire.v1 import worker_service_pb2 as pb
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub
from scheduler_service.columns import from_columns
from scheduler_service.core.config import KeptBlocks, KeptSequence
from scheduler_service.core.kv_cache.block_pool import KEY_BYTES
from scheduler_service.core.kv_cache.records import rows_by_entry
from scheduler_service.errors import InvalidArgument
from scheduler_service.tasks import run_all
from scheduler_service.wire import decode_kept_sequence

logger = logging.getLogger(__name__)

Entries: TypeAlias = dict[int, tuple[list[int], bytes]]
"""Rows and keys by first block."""


@dataclass(slots=True)
class RankReport:
    """What one rank has recorded."""

    key_seed: int | None = None
    """None if it has recorded nothing."""
    entries: Entries = field(default_factory=dict)
    sequences: dict[int, KeptSequence] = field(default_factory=dict)
    """By their number in the last stream."""


async def read_kept_blocks(
    stubs: Sequence[WorkerServiceStub], epoch: int, *, timeout_s: float
) -> KeptBlocks:
    """What all ranks of a group have recorded equally, and still hold."""
    return common_blocks(await run_all(*(_read(stub, epoch, timeout_s) for stub in stubs)))


def common_blocks(ranks: Sequence[RankReport]) -> KeptBlocks:
    """What the ranks' reports have in common. They have executed the same plans, but not all have
    executed the last ones."""
    seeds = {rank.key_seed for rank in ranks}
    if len(seeds) > 1 or None in seeds:
        if len(seeds) > 1:
            logger.warning("cached blocks are not used reason=ranks have different key seeds")
        return KeptBlocks()
    first, *others = (rank.entries for rank in ranks)
    common = {b: e for b, e in first.items() if all(other.get(b) == e for other in others)}
    stale = {block for rank in ranks for block in rank.entries} - common.keys()
    shared = set.intersection(*(set(rank.sequences) for rank in ranks))
    return KeptBlocks(
        key_seed=seeds.pop(),
        sequences=[common_sequence([r.sequences[n] for r in ranks]) for n in sorted(shared)],
        blocks=[number for rows, _ in common.values() for number in rows],
        keys=b"".join(keys for _, keys in common.values()),
        stale=sorted(stale),
    )


def common_sequence(ranks: Sequence[KeptSequence]) -> KeptSequence:
    """What the ranks' reports of one sequence have in common: fewer tokens and blocks, if a rank
    has executed fewer steps."""
    first, *others = ranks
    if all(other == first for other in others):
        return first
    token_ids = list(_common_prefix([rank.token_ids for rank in ranks]))
    tables = {}
    for number in set.intersection(*(set(rank.tables) for rank in ranks)):
        start = max(rank.tables[number][0] for rank in ranks)
        blocks = [rank.tables[number][1][start - rank.tables[number][0] :] for rank in ranks]
        tables[number] = start, list(_common_prefix(blocks))
    return KeptSequence(token_ids=token_ids, context=first.context, tables=tables, is_exact=False)


def _common_prefix(columns: Sequence[Sequence[int]]) -> Iterator[int]:
    for numbers in zip(*columns, strict=False):
        if len(set(numbers)) > 1:
            return
        yield numbers[0]


async def _read(stub: WorkerServiceStub, epoch: int, timeout_s: float) -> RankReport:
    """One rank's report; an empty one if it is malformed."""
    report = RankReport()
    request = pb.GetCachedBlocksRequest(epoch=epoch)
    async for message in stub.GetCachedBlocks(request, timeout=timeout_s):
        report.key_seed = message.key_seed
        try:
            report.entries.update(entries_of(message.blocks))
            for index, sequence in enumerate(message.sequences):
                kept = decode_kept_sequence(sequence, f"sequences[{index}].")
                report.sequences[sequence.seq_id] = kept
        except InvalidArgument as error:
            logger.warning("cached blocks are not used reason=%s", error)
            return RankReport()
    return report


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
