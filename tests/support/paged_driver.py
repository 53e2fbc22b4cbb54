"""Drives a model over a paged cache as the engine does: shuffled blocks, chunks, batches."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pagewire_kernels.batch import RowAdapters
from worker_service.cache_groups import CacheGroup
from worker_service.models.interface import Model

NAN = 255
"""A byte that, repeated, is NaN in each dtype; in int8, as scales."""


class PagedDriver:
    """Keeps sequences' block tables over one cache and runs batches of their tokens."""

    def __init__(
        self,
        model: Model,
        *,
        max_tokens: int = 128,
        max_seqs: int = 8,
        block_size: int = 8,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.model = model
        spec = model.kv_cache_spec
        self.groups = spec.groups(block_size)
        self._block_size = block_size
        counts = [max_seqs * group.table_width(max_tokens) for group in self.groups]
        self._device = torch.device(device)
        pool = torch.full((sum(counts) + 1, spec.block_bytes(block_size)), NAN, dtype=torch.uint8)
        pool[-1] = 0
        self.pool = pool.to(self._device)
        self._caches = spec.views(self.pool, block_size)
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed))
        self.tables = [blocks.view(max_seqs, -1) for blocks in order.split(counts)]
        """By cache group: [max_seqs, blocks of a sequence]."""

    def run(
        self, batch: Sequence[tuple[int, int, Sequence[int]]], adapters: RowAdapters = ()
    ) -> list[Tensor]:
        """Compute tokens of sequences: (sequence, position of the first, tokens). Returns the
        logits of each part's rows, [num_tokens, vocab_size]. adapters: of all layers but the LM
        head.

        Blocks that no row sees any more are released first: filled with NaN, and -1 in
        the table.
        """
        for group, tables in zip(self.groups, self.tables, strict=True):
            for sequence, start, _ in batch:
                self._release(group, tables[sequence], start)
        sequences = [sequence for sequence, _, _ in batch]
        token_ids = torch.tensor([token for _, _, tokens in batch for token in tokens])
        inputs = self.model.kv_cache_spec.batch_of_ranges(
            token_ids.to(self._device),
            [(start, start + len(tokens)) for _, start, tokens in batch],
            [tables[sequences].int().to(self._device) for tables in self.tables],
            self._caches,
            self._block_size,
        )
        hidden = self.model.forward(replace(inputs, adapters=adapters))
        lengths = [len(tokens) for _, _, tokens in batch]
        return list(self.model.compute_logits(hidden).cpu().split(lengths))

    def _release(self, group: CacheGroup, table: Tensor, position: int) -> None:
        """Release what no row from `position` on sees."""
        if not group.has_tokens:
            return
        released = table[: group.first_visible(position) // group.block_tokens]
        self.pool[released[released >= 0].to(self._device)] = NAN
        released.fill_(-1)

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, *, chunk: int | None = None
    ) -> list[list[int]]:
        """Greedy continuations of several prompts in one batch, prefilled in chunks or at once."""
        sequences = [list(prompt) for prompt in prompts]
        last = self._prefill(sequences, chunk)
        outputs: list[list[int]] = [[] for _ in sequences]
        for step in range(num_tokens):
            for output, sequence, logits in zip(outputs, sequences, last, strict=True):
                output.append(int(logits.argmax()))
                sequence.append(output[-1])
            if step + 1 < num_tokens:
                batch = [(i, len(s) - 1, s[-1:]) for i, s in enumerate(sequences)]
                last = [logits[-1] for logits in self.run(batch)]
        return outputs

    def _prefill(self, sequences: Sequence[list[int]], chunk: int | None) -> list[Tensor]:
        """Last logits of each sequence."""
        size = chunk or max(len(sequence) for sequence in sequences)
        last: list[Tensor] = [torch.empty(0)] * len(sequences)
        for start in range(0, max(len(sequence) for sequence in sequences), size):
            parts = [
                (i, s[start : start + size]) for i, s in enumerate(sequences) if start < len(s)
            ]
            logits = self.run([(i, start, tokens) for i, tokens in parts])
            for (i, _), part in zip(parts, logits, strict=True):
                last[i] = part[-1]
        return last
