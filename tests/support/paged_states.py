"""Sequences whose states are in pages: units scattered over pages that hold NaN elsewhere."""

from collections.abc import Sequence

import torch

from pagewire_kernels.batch import AttentionMetadata, StateSaves, StateUnits

_NUM_PAGES_OF_A_STATE = 3

_NUM_SAVES = 8


class PagedStates:
    """The pages of a pool, of which each sequence has three, that its units are scattered over."""

    def __init__(
        self,
        num_seqs: int,
        num_units: int,
        unit_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        stride = -(-unit_size // 16) * 16
        page_size = -(-num_units // _NUM_PAGES_OF_A_STATE) * stride
        num_pages = (num_seqs + _NUM_SAVES) * _NUM_PAGES_OF_A_STATE
        self.pages = torch.full((num_pages, page_size), torch.nan, dtype=dtype, device=device)
        order = torch.randperm(num_pages, generator=generator).int()
        tables = order.view(-1, _NUM_PAGES_OF_A_STATE).to(self.pages.device)
        self.tables, self.saved = tables[:num_seqs], tables[num_seqs:]
        """Pages of sequences, and of states that are saved, [n, 3]."""
        per_page = page_size // stride
        places = [(unit // per_page, unit % per_page * stride) for unit in range(num_units)]
        shuffled = torch.randperm(num_units, generator=generator)
        self.units = StateUnits(self.pages, torch.tensor(places)[shuffled].to(self.pages.device))

    def metadata(
        self, ranges: Sequence[tuple[int, int, int]], saves: Sequence[tuple[int, int]] = ()
    ) -> AttentionMetadata:
        """Of rows of sequences, each from a position up to an end: (sequence, first, end). saves:
        states to save, in this order: (sequence, number of tokens)."""
        device = self.tables.device
        lengths = [end - first for _, first, end in ranges]
        return AttentionMetadata(
            query_start=torch.tensor([0, *lengths]).cumsum(0).int().to(device),
            context_lens=torch.tensor([end for *_, end in ranges], dtype=torch.int32).to(device),
            block_tables=self.tables[[seq for seq, *_ in ranges]],
            slot_mapping=torch.zeros(sum(lengths), dtype=torch.int64, device=device),
            max_query_len=max(lengths),
            max_context_len=max(end for *_, end in ranges),
            saves=self._saves(ranges, saves) if saves else None,
        )

    def _saves(
        self, ranges: Sequence[tuple[int, int, int]], saves: Sequence[tuple[int, int]]
    ) -> StateSaves:
        rows = [(seq, at + 1) for seq, first, end in ranges for at in range(first, end)]
        column = torch.full((len(rows),), -1, dtype=torch.int32)
        for number, place in enumerate(saves):
            column[rows.index(place)] = number
        return StateSaves(column.to(self.tables.device), self.saved)
