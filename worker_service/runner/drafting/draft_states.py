"""States after drafts, from which a sequence continues if the drafts behind them are rejected.

Keys and values of a rejected draft are overwritten by the sequence's next row. A state is written
in place, so after a row with drafts only the one after the last draft would exist. The kernels
therefore save the state after each token that a draft follows (`AttentionMetadata.saves`), in
blocks that the scheduler does not know, and once the drafts are verified, the state after the last
token that was kept is copied to the sequence's own blocks. If all drafts were kept, it is there
already. All this happens within one step, after which no block of a sequence depends on a rejected
draft.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from worker_service.array_types import Int32Array, Int64Array
from worker_service.cache_groups import CacheGroup
from worker_service.errors import OutOfMemory
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.runner.batch.step_rows import StepRows
from worker_service.runner.state.sequence_table import SequenceTable

_MAX_SHARE = 8
"""At most one block in this number is used for states after drafts."""

_MAX_SEQS = 16
"""Sequences whose drafts have all their states: as many as a scheduler lets draft by default."""


def num_draft_blocks(groups: Sequence[CacheGroup], num_gpu_blocks: int, max_drafts: int) -> int:
    """Blocks for states after drafts, beside the `num_gpu_blocks` of the scheduler; 0 for a model
    without states, and for `max_drafts` of 0.

    Raises OutOfMemory if there is no room for a single state.
    """
    of_states = [group for group in groups if not group.has_tokens]
    if not of_states or not max_drafts:
        return 0
    (group,) = of_states
    num_states = num_gpu_blocks // _MAX_SHARE // group.num_blocks
    if num_states == 0:
        raise OutOfMemory(
            f"speculative: the state after a draft takes {group.num_blocks} KV blocks, more than"
            f" one in {_MAX_SHARE} of {num_gpu_blocks}; choose more kv_cache_memory, or no drafts"
        )
    return min(num_states, _MAX_SEQS * max_drafts) * group.num_blocks


class DraftStates:
    """The states that a step's rows pass through before their last draft."""

    def __init__(self, cache: CacheEngine, groups: Sequence[CacheGroup]) -> None:
        """cache: with blocks for drafts; groups: of the model, one of which is of states."""
        self._cache = cache
        (self._group,) = [n for n, group in enumerate(groups) if not group.has_tokens]
        self._num_blocks = groups[self._group].num_blocks
        self.max_drafts = len(cache.draft_blocks) // self._num_blocks
        """Of all rows of a step."""
        used = cache.draft_blocks[: self.max_drafts * self._num_blocks]
        self._blocks = used.reshape(self.max_drafts, self._num_blocks)

    def save(self, rows: StepRows) -> StepRows:
        """The rows, which have at most `max_drafts` drafts, with the states to be saved."""
        assert rows.drafts is not None
        counts = rows.drafts.counts.astype(np.int64)
        ends = np.repeat(rows.firsts + rows.num_tokens, counts)
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        places = np.arange(len(starts))
        saved = np.empty((len(places), self._num_blocks, 4), np.int32)
        saved[:, :, 0] = np.repeat(rows.row_ids, counts)[:, None]
        saved[:, :, 1] = self._group
        saved[:, :, 2] = (ends - np.repeat(counts, counts) + places - starts)[:, None]
        saved[:, :, 3] = self._blocks[: len(places)]
        of_plan = [] if rows.saved_states is None else [rows.saved_states]
        return replace(rows, saved_states=np.concatenate([*of_plan, saved.reshape(-1, 4)]))

    def restore(self, rows: StepRows, num_accepted: Int64Array, table: SequenceTable) -> None:
        """Copy to the sequences the states after the drafts that were accepted. num_accepted:
        [num_rows]."""
        assert rows.drafts is not None
        counts, start = rows.drafts.counts, 0
        pairs: list[Int32Array] = []
        for row in np.flatnonzero(counts).tolist():
            num_kept, count = int(num_accepted[row]), int(counts[row])
            if num_kept < count:
                own = table.tables[self._group].blocks[rows.row_ids[row], : self._num_blocks]
                pairs.append(np.stack([self._blocks[start + num_kept], own], axis=1))
            start += count
        if pairs:
            self._cache.copy(np.concatenate(pairs))
